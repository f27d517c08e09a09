import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.arrays import ArraysData
from stack_train.models.llama import LlamaConfig


def counted(batches=3, rows=2):
    for number in range(batches):
        yield {"x": np.full((rows, 4), number, np.float32), "row_ids": np.arange(rows)}


def ragged():
    yield {"x": np.zeros((2, 4), np.float32)}
    yield {"x": np.zeros((2, 5), np.float32)}


def nothing():
    return iter(())


def test_batches_go_round_and_resume():
    data = ArraysData(source=counted, validation=counted, options={"batches": 2})
    assert data.work() == ("examples", 2) and list(data.spec(None)) == ["x"]
    batches = data.build(seed=0, model=None)
    iterator = batches.train_iterator()
    assert [int(next(iterator)["x"][0, 0]) for _ in range(5)] == [0, 1, 0, 1, 0]
    other = batches.train_iterator()
    other.set_state(iterator.get_state())
    assert int(next(other)["x"][0, 0]) == 1
    assert len(list(batches.validation_batches())) == 2


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("numpy", ConfigError, "expected 'module:function'"),
        ("numpy:nothing_like_it", ConfigError, "cannot be imported"),
        ("numpy:pi", ConfigError, "is a float; a function was expected"),
        (nothing, DataError, "gives no batch"),
    ],
)
def test_what_is_no_source_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        ArraysData(source=source).spec(None)


def test_a_batch_unlike_the_first_is_refused():
    iterator = ArraysData(source=ragged).build(seed=0, model=None).train_iterator()
    next(iterator)
    with pytest.raises(DataError, match=r"Batch 1 of .* has arrays .*\(2, 5\)"):
        next(iterator)


def tokens(*ids, dtype=np.int32, targets=(1, -100)):
    for number in ids:
        yield {"tokens": np.full((1, 2), number, dtype), "targets": np.asarray([targets], np.int32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": (1, 9)}, "targets with 9, but the model has tokens 0 to 8. .*model.vocab_size"),
        ({"targets": (1, -2)}, "targets with -2"),
        ({"dtype": np.float32}, "tokens of float32; expected integer token ids"),
        ({"ids": (-100,)}, "tokens with -100"),
    ],
)
def test_tokens_that_a_language_model_has_not_are_refused_before_a_run_starts(options, message):
    def source(ids=(3,), **others):
        return tokens(*ids, **others)

    data = ArraysData(source=source, options=options)
    with pytest.raises(DataError, match=message):
        data.check(LlamaConfig(vocab_size=9))
    data.check(None)


def test_a_later_batch_with_a_token_beyond_the_vocabulary_is_refused():
    batches = ArraysData(source=lambda: tokens(3, 9)).build(seed=0, model=LlamaConfig(vocab_size=9))
    iterator = batches.train_iterator()
    next(iterator)
    with pytest.raises(DataError, match=r"Batch 1 of .* has tokens with 9, but"):
        next(iterator)


def test_a_state_of_another_source_is_refused():
    iterator = ArraysData(source=counted).build(seed=0, model=None).train_iterator()
    with pytest.raises(DataError, match="does not belong to"):
        iterator.set_state({"source": "another", "batches": 3})
