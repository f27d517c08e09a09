"""Plans of rows: every sequence once, and few places left empty."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stack_core.text.packing import best_fit, divide_row


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 20))
def test_rows_are_at_most_as_many_as_best_fit_decreasing_needs(lengths: list[int], capacity: int) -> None:
    """11 / 9 of the best that could be, and one (Johnson, 1973); no two rows would fit into one."""
    order, starts = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    filled = [int(np.array(lengths)[order[a:b]].sum()) for a, b in itertools.pairwise(starts)]
    assert all(0 < total <= capacity for total in filled)
    least = -(-sum(lengths) // capacity)
    assert len(filled) <= 11 / 9 * least + 4
    assert all(one + other > capacity for i, one in enumerate(filled) for other in filled[:i])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(4, 7))
def test_a_row_is_divided_only_before_a_sequence_that_does_not_fit(sizes: list[int], limit: int) -> None:
    row = np.arange(len(sizes), dtype=np.int64) + 5
    parts = divide_row(row, sizes, limit)
    assert np.concatenate(parts).tolist() == row.tolist()
    of_part = [[sizes[sequence - 5] for sequence in part.tolist()] for part in parts]
    assert all(sum(each) <= limit for each in of_part)
    assert all(sum(each) + after[0] > limit for each, after in itertools.pairwise(of_part))
