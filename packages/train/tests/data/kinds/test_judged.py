from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError
from stack_train.data.kinds.judged import JudgedData

MODEL = SimpleNamespace(vocab_size=300, max_positions=256)
RECORDS = [
    {"prompt": f"{n // 2}?", "completion": "y" * (1 + n % 3), "label": n % 2 == 0} for n in range(6)
]  # two answers to each prompt


@pytest.fixture
def build(make_tokenizer, write_jsonl):
    def build(records, **fields):
        section = {"source": str(write_jsonl(records)), "tokenizer": str(make_tokenizer(None)), "seq_tokens": 8}
        config = JudgedData(**{**section, "batch_size": 6, "validation_fraction": 0.0, **fields})
        return config, config.build(seed=0, model=MODEL)

    return build


def score(params, batch):
    return {"logprobs": np.where(batch["targets"] != IGNORED_TARGET, -params, 0).astype(np.float32)}


def test_a_batch_holds_answers_their_labels_and_answers_to_other_prompts(build):
    config, batches = build(RECORDS)
    batches.update_weights(2.0, 0, score)
    batch = next(batches.train_iterator())
    spec = config.spec(MODEL)
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name in spec} == {
        name: (struct.shape, struct.dtype) for name, struct in spec.items()
    }
    names = batches.describe_rows(batch["row_ids"])
    for row, name in enumerate(names):
        number = int(name.rpartition(":")[2]) - 1
        assert batch["desirable"][row] == (number % 2 == 0)
        own, other = (batches.tokenizer.decode(batch["tokens"][row, each].tolist()) for each in (0, 1))
        assert own.startswith(f"{number // 2}?") and other.startswith(f"{number // 2}?")
        following = number + (2 if number % 2 == 0 else 1)  # the next record with another prompt
        counts = (batch["targets"][row] != IGNORED_TARGET).sum(-1)
        np.testing.assert_array_equal(counts, [2 + number % 3, 2 + (following % 6) % 3])  # and the end of the text
        np.testing.assert_array_equal(batch["reference_logprobs"][row], -2.0 * counts)


def test_labels_are_part_of_where_the_data_stands(build):
    _, batches = build(RECORDS)
    state = batches.train_iterator().get_state()
    _, others = build([{**record, "label": True} for record in RECORDS])
    with pytest.raises(DataError, match="labels"):
        others.train_iterator().set_state(state)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "label": True}, "no completion. Its fields: 'prompt', 'label'"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label is 'good'; expected true"),
        ({"prompt": "a", "completion": "b", "label": True}, "1 answers to a single prompt"),
    ],
)
def test_records_that_cannot_be_used_are_refused(build, record, message):
    with pytest.raises(DataError, match=message):
        build([record])
