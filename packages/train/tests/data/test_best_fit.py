"""Plans of rows: every token once, no document cut that fits into a row, and few places left empty."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.data import IGNORED_TARGET
from stack_core.text.packing import best_fit
from stack_train.data.best_fit import BestFitPacking
from stack_train.data.examples import plan_rows

LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=30)


def _packing(lengths: list[int], seq_tokens: int, seed: int | None) -> BestFitPacking:
    """Document i holds the tokens 100 * i + 1, 100 * i + 2, ..., so that a token tells where it belongs."""
    documents = [100 * index + 1 + np.arange(length) for index, length in enumerate(lengths)]
    tokens = np.concatenate(documents).astype(np.uint16)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    return BestFitPacking(tokens, offsets, np.arange(len(lengths)), seq_tokens=seq_tokens, seed=seed)


@given(LENGTHS, st.integers(1, 9), st.one_of(st.none(), st.integers(0, 5)))
def test_every_target_is_there_once_behind_its_token(lengths: list[int], seq_tokens: int, seed: int | None) -> None:
    packing = _packing(lengths, seq_tokens, seed)
    batch = packing.batch(np.arange(packing.rows))
    seen = batch["targets"][batch["targets"] != IGNORED_TARGET]
    expected = [100 * index + 1 + k for index, length in enumerate(lengths) for k in range(1, length)]
    assert sorted(seen.tolist()) == expected
    filled = batch["segment_ids"] > 0
    np.testing.assert_array_equal(batch["targets"][filled], batch["tokens"][filled] + 1)
    assert packing.targets == len(expected)
    for row in range(packing.rows):
        for segment, piece in enumerate(packing.pieces(row), start=1):
            mine = batch["segment_ids"][row] == segment
            assert piece.start_token % seq_tokens == 0
            assert batch["tokens"][row][mine].tolist() == [
                100 * piece.document + 1 + k for k in range(piece.start_token, piece.end_token)
            ]
            assert batch["positions"][row][mine].tolist() == list(range(mine.sum()))


def test_documents_of_a_corpus_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 2000).astype(int).clip(2, 20_000)
    documents = np.zeros(int(lengths.sum()), np.uint16)
    packing = BestFitPacking(
        documents, np.append(0, np.cumsum(lengths)).astype(np.int64), np.arange(2000), seq_tokens=2048, seed=0
    )
    assert packing.fill > 0.98
    cut = sum(piece.start_token > 0 for row in range(packing.rows) for piece in packing.pieces(row))
    assert cut == sum((length - 2) // 2048 for length in lengths.tolist())


def test_epochs_hold_the_same_rows() -> None:
    packing = _packing([5, 9, 3, 20], 8, 0)
    for name, values in packing.batch(np.arange(packing.rows)).items():
        if name != "row_ids":
            np.testing.assert_array_equal(packing.batch(3 * packing.rows + np.arange(packing.rows))[name], values)


def test_no_documents_are_no_rows() -> None:
    assert _packing([1, 0], 4, None).rows == 0


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lengths", [[], [4], [3, 8, 5, 2, 2, 7]], ids=len)
def test_rows_of_examples_are_those_of_best_fit_or_of_one_example_each(lengths: list[int], packed: bool) -> None:
    rows = [row.tolist() for row in plan_rows(np.array(lengths, np.int64), 10, packed=packed)]
    packings = {0: [], 1: [[0]], 6: [[1, 3], [5, 0], [2, 4]]}
    assert rows == (packings[len(lengths)] if packed else [[index] for index in range(len(lengths))])


@pytest.mark.parametrize("lengths", [[8, 8], [3, 5, 8]])
def test_rows_without_a_gap(lengths: list[int]) -> None:
    order, starts = best_fit(np.array(lengths, np.int64), 8)
    assert len(starts) - 1 == 2 and len(order) == len(lengths)
