from hypothesis import given
from hypothesis import strategies as st

from stack_serve.inference.batching import cheapest
from stack_serve.inference.costs import Costs

MEASURED = {1: [30e-6, 90e-6], 8: [50e-6, 4e-3], 16: [75e-6, 60e-6]}


def test_the_least_measurement_counts() -> None:
    assert Costs(MEASURED).at(0.0) == {1: 30e-6, 8: 50e-6, 16: 60e-6}


def test_a_size_costs_at_most_what_a_larger_one_does() -> None:
    costs = Costs({1: [4e-3], 8: [3e-3], 16: [9e-3], 32: [6e-3]}).at(0.0)
    assert costs == {1: 3e-3, 8: 3e-3, 16: 6e-3, 32: 6e-3}
    assert cheapest(9, tuple(costs.items())) == (16,)  # as 8 + 1 by the measurements as they are


def test_one_disturbed_call_changes_nothing_and_several_do_for_a_while() -> None:
    costs = Costs(MEASURED)
    before = costs.at(0.0)
    for took_s in (5e-3, 5e-3, 5e-3, 5e-3, 60e-6):
        costs.note(16, took_s, 0.0)
    assert costs.at(0.0) is before
    for _ in range(5):
        costs.note(16, 5e-3, 1.0)
    assert costs.at(1.5)[16] == 5e-3
    assert costs.at(2.5)[16] == 60e-6


def test_a_cost_stays_up_while_calls_confirm_it_and_falls_with_them() -> None:
    costs = Costs(MEASURED)
    for number in range(40):
        costs.note(16, 5e-3, number / 2)
    assert costs.at(20.0)[16] == 5e-3
    for _ in range(5):
        costs.note(16, 55e-6, 20.0)
    assert costs.at(20.0)[16] == 60e-6


def test_a_size_that_was_disturbed_while_it_was_measured_is_corrected_by_its_first_good_call() -> None:
    costs = Costs({1: [30e-6], 16: [9e-3]})
    costs.note(16, 60e-6, 0.0)
    assert costs.at(0.0)[16] == 60e-6


@given(st.lists(st.tuples(st.sampled_from([1, 8, 16]), st.floats(1e-6, 1e-1)), max_size=60))
def test_costs_ascend_and_return_to_the_least_whatever_was_noted(noted: list[tuple[int, float]]) -> None:
    costs = Costs(MEASURED)
    for number, (size, took_s) in enumerate(noted):
        costs.note(size, took_s, number / 10)
        values = list(costs.at(number / 10).values())
        assert values == sorted(values)
    assert costs.at(1e3)[16] <= 60e-6 and costs.at(1e3)[8] <= 50e-6
