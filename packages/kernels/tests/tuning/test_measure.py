"""Times are taken in turns and to completion; the clock here is advanced by the candidates themselves."""

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from stack_kernels.tuning import measure as module
from stack_kernels.tuning.measure import Ratio, Timing, measure


class Clock:
    """Wall time that passes when a candidate says so, and CPU time that passes twice as fast."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[str] = []

    def candidate(self, name: str, *durations_s: float) -> Callable[[], None]:
        """Takes the given times call by call, the last one for ever."""
        remaining: Iterator[float] = iter(durations_s[:-1])

        def call() -> None:
            self.log.append(name)
            self.now_s += next(remaining, durations_s[-1])

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    times = SimpleNamespace(perf_counter=lambda: clock.now_s, process_time=lambda: 2 * clock.now_s)
    monkeypatch.setattr(module, "time", times)
    return clock


def test_the_first_calls_do_not_count_and_the_others_take_turns(clock: Clock) -> None:
    calls = {"a": clock.candidate("a", 9.0, 1.0, 1.0, 1.2, 1.1), "b": clock.candidate("b", 9.0, 1.1)}
    found = measure(calls, rounds=3, stop_early=False)
    assert "".join(clock.log) == "aabb" + "ab" + "ba" + "ab"
    assert found.timings["a"].wall_s == pytest.approx((1.0, 1.2, 1.1))
    assert found.timings["a"].cpu_s == pytest.approx((2.0, 2.4, 2.2))
    assert (found.timings["a"].median_s, found.timings["b"].rounds) == (pytest.approx(1.1), 3)
    assert found.timings["a"].spread == pytest.approx(0.1 / 1.1)
    assert not found.interrupted and not found.out_of_time


def test_what_was_called_before_is_called_once_before_it_counts(clock: Clock) -> None:
    measure({"a": clock.candidate("a", 1.0)}, rounds=2, compiled=True)
    assert clock.log == ["a"] * 3


def test_a_call_that_is_too_short_for_the_clock_is_repeated(clock: Clock) -> None:
    found = measure({"short": clock.candidate("s", 1e-5)}, rounds=2, stop_early=False)
    assert len(clock.log) == 2 + 2 * 100
    assert found.timings["short"].median_s == pytest.approx(1e-5)


def test_what_is_clearly_slower_gets_fewer_rounds(clock: Clock) -> None:
    durations_s = {"best": 1.0, "near": 1.01, "slow": 2.0, "hopeless": 50.0}
    found = measure({name: clock.candidate(name, at) for name, at in durations_s.items()}, rounds=15)
    rounds = {name: timing.rounds for name, timing in found.timings.items()}
    assert rounds == {"best": 5, "near": 5, "slow": 5, "hopeless": 2}


def test_what_differs_by_less_than_it_varies_is_measured_to_the_end(clock: Clock) -> None:
    a, b = clock.candidate("a", *[1.0, 1.3] * 8), clock.candidate("b", *[1.3, 1.0] * 8)
    found = measure({"a": a, "b": b}, rounds=7)
    assert {timing.rounds for timing in found.timings.values()} == {7}


def test_a_small_difference_that_is_always_there_decides(clock: Clock) -> None:
    drift = [1.0 + step / 10 for step in range(20)]
    a, b = clock.candidate("a", *drift), clock.candidate("b", *(1.02 * x for x in drift))
    found = measure({"a": a, "b": b}, rounds=15)
    assert found.timings["b"].rounds == 6
    assert found.timings["b"].ratio_to(found.timings["a"]).low > 1


def test_the_budget_ends_it_with_what_there_is(clock: Clock) -> None:
    found = measure({"a": clock.candidate("a", 1.0), "b": clock.candidate("b", 1.0)}, budget_s=7.5)
    assert found.out_of_time
    assert {name: timing.rounds for name, timing in found.timings.items()} == {"a": 2, "b": 2}


def test_what_the_budget_does_not_reach_has_no_timing(clock: Clock) -> None:
    found = measure({"a": clock.candidate("a", 5.0), "b": clock.candidate("b", 1.0)}, budget_s=5.0)
    assert found.out_of_time
    assert {name: timing.rounds for name, timing in found.timings.items()} == {"a": 1}


def test_ctrl_c_keeps_what_was_measured(clock: Clock) -> None:
    calls = iter(range(100))

    def interrupted() -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        clock.now_s += 1.0

    found = measure({"a": clock.candidate("a", 1.0), "b": interrupted}, stop_early=False)
    assert found.interrupted
    assert {name: timing.rounds for name, timing in found.timings.items()} == {"a": 3, "b": 3}


def test_what_raises_costs_only_itself(clock: Clock) -> None:
    def broken() -> None:
        raise ValueError("no such tile")

    found = measure({"broken": broken, "a": clock.candidate("a", 1.0)}, rounds=2)
    assert list(found.timings) == ["a"]
    assert str(found.errors["broken"]) == "no such tile"


def test_each_round_is_told(clock: Clock) -> None:
    told: list[int] = []
    measure({"a": clock.candidate("a", 1.0)}, rounds=2, on_round=lambda: told.append(1))
    assert len(told) == 2
    assert measure({}).timings == {}


def test_results_are_waited_for(clock: Clock) -> None:
    """To completion: dispatch takes a tenth here of what the computation takes."""

    class Pending:
        def block_until_ready(self) -> "Pending":
            clock.now_s += 1.0
            return self

    def dispatch() -> dict[str, Pending]:
        clock.now_s += 0.1
        return {"nested": Pending()}

    assert measure({"a": dispatch}).timings["a"].median_s == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("ratios", "low", "high"),
    [
        ((1.0, 1.1, 1.2, 1.3, 1.4), 0.0, math.inf),
        ((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 1.0, 1.5),
        ((1.4, 1.0, 1.1, 1.2, 1.3, 1.5, 9.0, 0.1, 1.25), 1.0, 1.5),
    ],
)
def test_the_interval_is_that_of_the_sign_test(ratios: Sequence[float], low: float, high: float) -> None:
    """95% needs six pairs; of nine, one may be left out at either end (2 * 10 / 512 = 0.039)."""
    ratio = Ratio.of(ratios, 0.95)
    assert (ratio.low, ratio.high, ratio.confidence) == (low, high, 0.95)


def test_ratios_are_of_the_rounds_that_both_have() -> None:
    one, other = Timing((2.0, 4.0, 8.0), (0.0,) * 3), Timing((1.0, 2.0), (0.0,) * 2)
    assert one.ratio_to(other).median == 2.0
    assert Timing((1.0,), (1.0,)).spread == 0.0
    assert Timing((1.0, 3.0), (1.0, 1.0)).spread == 1.0


def test_a_turn_waits_once_for_a_device_that_computes_in_order(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(module.jax, "block_until_ready", waits.append)
    for platform, duration_s, calls in (("tpu", 2e-3, 10), ("tpu", 2e-2, 2), ("tpu", 1.0, 1), ("cpu", 1e-2, 1)):
        clock.log.clear(), waits.clear()
        monkeypatch.setattr(module.jax, "default_backend", lambda platform=platform: platform)
        measure({"a": clock.candidate("a", duration_s)}, rounds=2, compiled=True)
        assert (len(clock.log), len(waits)) == (1 + 2 * calls, 1 + 2)
