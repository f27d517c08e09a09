import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.data import IGNORED_TARGET
from stack_train.data.packing import Packing

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: max(lengths) > 1)


def _packing(lengths: list[int], seq_tokens: int, seed: int | None) -> Packing:
    """Document i holds the tokens 100 * i + 1, 100 * i + 2, ..., so that a token tells where it belongs."""
    documents = [100 * index + 1 + np.arange(length) for index, length in enumerate(lengths)]
    tokens = np.concatenate(documents).astype(np.uint16)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    return Packing(tokens, offsets, np.arange(len(lengths)), seq_tokens=seq_tokens, seed=seed)


def _expected_row(lengths: list[int], order: list[int], seq_tokens: int, row: int) -> list[tuple[int, int, int, int]]:
    """(token, target, position, segment) of each place, found by walking through all documents."""
    places = [(index, place) for index in order for place in range(lengths[index] - 1)]
    window = places[row * seq_tokens : (row + 1) * seq_tokens]
    result: list[tuple[int, int, int, int]] = []
    for column, (index, place) in enumerate(window):
        starts = column == 0 or window[column - 1][0] != index
        position = 0 if starts else result[-1][2] + 1
        segment = (result[-1][3] if result else 0) + starts
        result.append((100 * index + 1 + place, 100 * index + 2 + place, position, segment))
    return result + [(0, IGNORED_TARGET, 0, 0)] * (seq_tokens - len(result))


@given(LENGTHS, st.integers(1, 9), st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 2))
def test_rows_match_a_walk_through_the_documents(
    lengths: list[int], seq_tokens: int, seed: int | None, epoch: int
) -> None:
    packing = _packing(lengths, seq_tokens, seed)
    row_ids = epoch * packing.rows + np.arange(packing.rows)
    batch = packing.batch(row_ids)
    seen = [token // 100 for token in batch["tokens"].ravel() if token]
    order = list(dict.fromkeys(seen))
    assert sorted(order) == [index for index, length in enumerate(lengths) if length > 1]
    assert seed is not None or order == sorted(order)
    arrays = np.stack([batch[name] for name in ("tokens", "targets", "positions", "segment_ids")], axis=-1)
    for row in range(packing.rows):
        assert list(map(tuple, arrays[row].tolist())) == _expected_row(lengths, order, seq_tokens, row)
    assert (
        (batch["targets"] != IGNORED_TARGET).sum() == packing.targets == sum(max(length - 1, 0) for length in lengths)
    )


@given(LENGTHS, st.integers(1, 9), st.data())
def test_a_row_does_not_depend_on_its_batch(lengths: list[int], seq_tokens: int, data: st.DataObject) -> None:
    packing = _packing(lengths, seq_tokens, seed=3)
    row_ids = np.array(data.draw(st.lists(st.integers(0, 4 * packing.rows - 1), min_size=1, max_size=6)))
    batch = packing.batch(row_ids)
    for index, row_id in enumerate(row_ids):
        alone = packing.batch(np.array([row_id]))
        for name, values in batch.items():
            np.testing.assert_array_equal(values[index], alone[name][0])


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3))
def test_pieces_are_what_the_row_holds(lengths: list[int], seq_tokens: int, epoch: int) -> None:
    packing = _packing(lengths, seq_tokens, seed=1)
    for row_id in range(epoch * packing.rows, (epoch + 1) * packing.rows):
        row = packing.batch(np.array([row_id]))["tokens"][0]
        held = [
            100 * piece.document + 1 + token
            for piece in packing.pieces(row_id)
            for token in range(piece.start_token, piece.end_token)
        ]
        assert row[row > 0].tolist() == held


def test_the_order_is_another_in_each_epoch_and_for_each_seed() -> None:
    lengths = [3] * 50
    first = _packing(lengths, 100, seed=0)
    orders = [first.batch(np.array([epoch]))["tokens"].tolist() for epoch in range(3)]
    orders.append(_packing(lengths, 100, seed=1).batch(np.array([0]))["tokens"].tolist())
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_the_order_stays_the_same_in_later_releases() -> None:
    """A saved position is worth nothing if the order that it counts in changes."""
    tokens = _packing([3] * 8, 16, seed=7).batch(np.array([0]))["tokens"][0]
    assert [int(token) // 100 for token in tokens[::2]] == [6, 3, 4, 0, 2, 7, 5, 1]


def test_a_million_documents() -> None:
    lengths = np.random.default_rng(0).integers(0, 5, 1_000_000)
    offsets = np.append(0, np.cumsum(lengths))
    packing = Packing(np.ones(offsets[-1], np.uint16), offsets, np.arange(len(lengths)), seq_tokens=512, seed=0)
    batch = packing.batch(np.array([0, packing.rows - 1, packing.rows]))
    assert (batch["targets"][0] == 1).all()
    assert batch["row_ids"].dtype == np.int64


@pytest.mark.parametrize("lengths", [[0], [1, 1]])
def test_documents_without_a_target_take_no_row(lengths: list[int]) -> None:
    assert _packing(lengths, 4, seed=0).rows == 0
