from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError
from stack_core.abi.policy import PolicyBatches
from stack_train.data.kinds.preferences import PreferenceData

MODEL = SimpleNamespace(vocab_size=300, max_positions=256)
RECORDS = [{"prompt": f"{n}?", "chosen": "y" * (1 + n % 3), "rejected": "no"} for n in range(5)]


@pytest.fixture
def build(make_tokenizer, write_jsonl):
    def build(records, **fields):
        section = {"source": str(write_jsonl(records)), "tokenizer": str(make_tokenizer(None)), "seq_tokens": 12}
        config = PreferenceData(**{**section, "batch_size": 2, "validation_fraction": 0.0, **fields})
        return config, config.build(seed=0, model=MODEL)

    return build


def score(params, batch):
    """Minus the number of a row's targets times `params`."""
    real = batch["targets"] != IGNORED_TARGET
    return {"logprobs": np.where(real, -params, 0).astype(np.float32)}


def test_a_batch_holds_both_answers_and_what_the_first_weights_make_of_them(build):
    config, batches = build(RECORDS)
    assert isinstance(batches, PolicyBatches)
    batches.update_weights(2.0, 0, score)
    batches.update_weights(7.0, 1, score)  # later weights change nothing
    batch = next(batches.train_iterator())
    spec = config.spec(MODEL)
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name in spec} == {
        name: (struct.shape, struct.dtype) for name, struct in spec.items()
    }
    counts = (batch["targets"] != IGNORED_TARGET).sum(-1)
    np.testing.assert_array_equal(batch["reference_logprobs"], -2.0 * counts)
    assert (counts[:, 1] == 3).all()  # "no" and the end of the text


def test_some_pairs_of_a_batch_are_those_of_the_whole(build):
    _, batches = build(RECORDS)
    some = batches.with_rows(np.array([1]))
    for each in (batches, some):
        each.update_weights(2.0, 0, score)  # of all pairs, which all processes score together
    whole, second = next(batches.train_iterator()), next(some.train_iterator())
    assert all(np.array_equal(second[name], whole[name][1:]) for name in whole if name != "row_ids")


def test_the_reference_is_scored_once_and_kept_beside_the_run(build, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    _, first = build(RECORDS)
    first.write(run)
    first.update_weights(2.0, 0, score)
    _, resumed = build(RECORDS)
    resumed.write(run)
    resumed.update_weights(9.0, 4, score)
    left, right = next(first.train_iterator()), next(resumed.train_iterator())
    np.testing.assert_array_equal(left["reference_logprobs"], right["reference_logprobs"])
    kept = run / "reference_logprobs.npz"
    kept.write_bytes(kept.read_bytes()[:-40])
    _, torn = build(RECORDS)
    torn.write(run)
    with pytest.raises(DataError, match=r"reference_logprobs\.npz cannot be read: .*Restore the file"):
        torn.update_weights(9.0, 4, score)
    kept.unlink()
    _, lost = build(RECORDS)
    lost.write(run)
    with pytest.raises(DataError, match=r"reference's log-probabilities are missing: .*restore the file"):
        lost.update_weights(9.0, 4, score)


def test_kept_references_follow_their_pairs(build, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    _, first = build(RECORDS)
    first.write(run)
    first.update_weights(2.0, 0, score)

    def resumed(records, **fields):
        _, batches = build(records, **fields)
        batches.write(run)
        batches.update_weights(9.0, 4, score)
        return batches

    for records in (RECORDS[::-1], RECORDS[1:], [RECORDS[3], *RECORDS]):  # in another order, fewer, one twice
        batch = next(resumed(records).train_iterator())
        np.testing.assert_array_equal(batch["reference_logprobs"], -2.0 * (batch["targets"] != IGNORED_TARGET).sum(-1))
    for changed in ({"prompt": "new?", "chosen": "y", "rejected": "no"}, RECORDS[2] | {"rejected": "never"}):
        with pytest.raises(DataError, match=r"lacks the log-probabilities of 1 of 6 pairs, the first of which is .*:3"):
            resumed([*RECORDS[:2], changed, *RECORDS[2:]])


def test_messages_share_their_beginning_as_prompt(build):
    begin = [{"role": "user", "content": "a"}]
    records = [{"chosen": [*begin, {"role": "assistant", "content": "b"}], "rejected": begin}]
    with pytest.raises(DataError, match="begin with different messages"):
        build(records)
    with pytest.raises(DataError, match=r"has no chosen\. Its fields: 'rejected'"):
        build([{"rejected": "x"}])
    with pytest.raises(DataError, match="are not lists of messages"):
        build([{"chosen": "x", "rejected": "y"}])


def test_a_pair_is_left_out_whole(build):
    records = [*RECORDS, {"prompt": "p", "chosen": "y", "rejected": "n" * 40}]
    with pytest.raises(DataError, match="1 of 6 examples are longer"):
        build(records)
    _, kept = build(records, too_long="drop", reference=False)
    assert len(kept._training) == 5
    assert "reference_logprobs" not in next(kept.train_iterator())
