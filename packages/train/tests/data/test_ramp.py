"""Stages of smaller batches at the start of a run."""

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, DataError, ShardingError
from stack_train.data.ramp import RampedBatches, RampStage, check_ramp

ROWS = 12
STAGES = (RampStage(rows=3, steps=8), RampStage(rows=6, steps=4))  # two batches each


@pytest.fixture
def ramped(pipeline):
    def build(stages=STAGES):
        return RampedBatches(pipeline(seq_tokens=16, batch_size=ROWS), stages, ROWS)

    return build


def taken(data, count):
    iterator = data.train_iterator()
    return [next(iterator) for _ in range(count)]


def test_small_batches_have_every_row_of_the_large_ones_once(pipeline, ramped):
    whole, small = taken(pipeline(seq_tokens=16, batch_size=ROWS), 6), taken(ramped(), 14)
    assert [len(batch["tokens"]) for batch in small] == [3] * 8 + [6] * 4 + [12] * 2
    for first, parts, large in ((0, 4, 0), (4, 4, 1), (8, 2, 2), (10, 2, 3), (12, 1, 4), (13, 1, 5)):
        together = [small[first + part] for part in range(parts)]
        for name, array in whole[large].items():
            for part, batch in enumerate(together):
                assert np.array_equal(batch[name], array[part::parts]), (name, part)


def test_a_position_inside_of_a_batch_is_restored(ramped):
    expected = taken(ramped(), 16)
    for step in range(14):
        iterator = ramped().train_iterator()
        for _ in range(step):
            next(iterator)
        other = ramped().train_iterator()
        next(other)
        other.set_state(iterator.get_state())
        for batch in expected[step : step + 2]:
            assert np.array_equal(next(other)["tokens"], batch["tokens"])


def test_processes_share_the_small_batches_that_one_has(ramped):
    whole = taken(ramped(), 13)
    # Blocks of neighboring rows, as meshes give them to devices.
    for process, rows in enumerate((np.arange(4), np.arange(4, 12))):
        for batch, own in zip(whole, taken(ramped().with_rows(rows), 13), strict=True):
            count = len(batch["tokens"]) * len(rows) // ROWS
            first = process * len(batch["tokens"]) // 3
            assert np.array_equal(own["tokens"], batch["tokens"][first : first + count])
            assert np.array_equal(own["row_ids"], batch["row_ids"])


def test_another_ramp_is_refused_inside_of_a_batch_only(ramped):
    iterator = ramped().train_iterator()
    for step in range(1, 5):
        next(iterator)
        other = ramped((RampStage(rows=6, steps=4),)).train_iterator()
        if step == 4:
            other.set_state(iterator.get_state())
            continue
        with pytest.raises(DataError, match=f"Step {step} of the run ended inside a batch of the data"):
            other.set_state(iterator.get_state())
    with pytest.raises(DataError, match=r"one without run\.ramp"):
        iterator.set_state({"batches": 3})


def test_stages_that_do_not_divide_batches_are_refused(ramped):
    for stage, message in (
        (RampStage(rows=12, steps=2), r"run\.ramp\[0\]\.rows is 12, and data\.batch_size is 12"),
        (RampStage(rows=5, steps=2), "a smaller number that divides it"),
        (RampStage(rows=3, steps=6), "4 steps of 3 rows take one of 12. Give 4 or 8 steps"),
        (RampStage(rows=3, steps=1), "Give 4 steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_ramp([stage], 12)
    assert list(ramped().split_rows(3)) == [3, 6]
    with pytest.raises(ShardingError, match=r"run\.ramp\[0\]\.rows is 3, .* into 2 equal parts. Give a multiple of 2"):
        check_ramp(STAGES, ROWS, 2)
