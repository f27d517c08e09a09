from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stack_serve.inference.batching import cheapest, plan

SMALL = ((1, 99.0), (2, 110.0), (4, 150.0), (8, 212.0), (16, 300.0), (32, 413.0))  # microseconds, a small MLP
CONVOLUTIONS = ((1, 49.0), (2, 95.0), (4, 180.0), (8, 350.0), (16, 730.0), (32, 1503.0))  # milliseconds, ResNet-18

COSTS = st.dictionaries(st.sampled_from([1, 2, 3, 4, 8, 16]), st.floats(0.01, 10), min_size=1).map(
    lambda costs: tuple(sorted(costs.items()))
)


@dataclass
class Rows:
    rows: int
    group: str = "a"
    deadline_s: float | None = None


def test_padding_up_is_chosen_where_it_is_cheap_and_splitting_where_it_is_not() -> None:
    assert cheapest(9, SMALL) == (16,)
    assert cheapest(9, CONVOLUTIONS) == (8, 1)
    assert cheapest(3, SMALL) == (4,)
    assert cheapest(3, CONVOLUTIONS) == (2, 1)


@given(st.integers(1, 40), COSTS)
def test_the_sizes_hold_the_rows_and_no_other_two_sizes_are_cheaper(
    rows: int, costs: tuple[tuple[int, float], ...]
) -> None:
    sizes = cheapest(rows, costs)
    by_size = dict(costs)
    assert sum(sizes) >= min(rows, 2 * costs[-1][0])
    assert list(sizes) == sorted(sizes, reverse=True)
    if rows <= costs[-1][0]:
        alone = min(cost for size, cost in costs if size >= rows)
        pairs = [a + b for x, a in costs for y, b in costs if x + y >= rows]
        assert sum(by_size[size] for size in sizes) <= min(alone, *pairs) + 1e-9


def test_a_call_takes_the_oldest_first_and_a_part_of_the_last() -> None:
    planned = plan([Rows(3), Rows(4), Rows(5)], {"a": {8: 1.0}}, 0.0)
    assert planned.call is not None
    assert (planned.call.size, planned.call.takes) == (8, ((0, 3), (1, 4), (2, 1)))


def test_groups_do_not_share_a_call_and_the_oldest_goes_first() -> None:
    planned = plan([Rows(1, "b"), Rows(1), Rows(1, "b")], {"a": {8: 1.0}, "b": {4: 1.0}}, 0.0)
    assert planned.call is not None
    assert (planned.call.group, planned.call.size, planned.call.takes) == ("b", 4, ((0, 1), (2, 1)))


def test_what_is_late_is_dropped_and_nothing_left_is_no_call() -> None:
    waiting = [Rows(1, deadline_s=1.0), Rows(2), Rows(1, deadline_s=3.0)]
    planned = plan(waiting, {"a": {1: 1.0, 4: 1.1}}, 2.0)
    assert planned.expired == (0,)
    assert planned.call is not None and planned.call.takes == ((1, 2), (2, 1))
    assert plan(waiting[:1], {"a": {1: 1.0}}, 1.0).call is None
