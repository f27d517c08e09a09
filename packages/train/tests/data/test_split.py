import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.errors import DataError
from stack_train.data.split import split_documents, text_digest

DIGESTS = st.lists(st.integers(0, 30), min_size=1, max_size=60).map(lambda values: np.array(values, np.uint64))


@given(DIGESTS, st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_each_text_lies_on_one_side(digests: np.ndarray, fraction: float) -> None:
    try:
        training, validation = split_documents(digests, fraction)
    except DataError:
        assert fraction > 0
        return
    assert sorted([*training, *validation]) == list(range(digests.size))
    assert not set(digests[training]) & set(digests[validation])
    assert training.size
    assert bool(validation.size) == bool(fraction)


@given(DIGESTS, st.randoms())
def test_the_order_of_documents_does_not_matter(digests: np.ndarray, random) -> None:
    order = np.array(random.sample(range(digests.size), digests.size))
    try:
        _, validation = split_documents(digests, 0.3)
    except DataError:
        return
    _, reordered = split_documents(digests[order], 0.3)
    assert sorted(digests[validation]) == sorted(digests[order][reordered])


def test_holds_out_as_many_as_asked_for() -> None:
    digests = np.array([text_digest(str(number)) for number in range(1000)], np.uint64)
    assert len(split_documents(digests, 0.05)[1]) == 50
    assert len(split_documents(digests, 0.0001)[1]) == 1


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(DataError, match=r"holds out all 3 document\(s\)"):
        split_documents(np.array([5, 5, 5], np.uint64), 0.05)
    with pytest.raises(DataError, match="holds no text"):
        split_documents(np.array([], np.uint64), 0.0)
