"""The order of the checks, and the time that they take on a simulated device."""

import itertools

import pytest

from stack_core.testing import accelerator_checks
from stack_kernels.burn_in.checks import (
    Check,
    CheckResult,
    Pool,
    choice_order,
    contract_checks,
    in_order,
    planned_checks,
    run_checks,
)


class SlowDevice(Pool):
    """A device with `slots` concurrent checks, each of which takes `seconds` on a simulated clock."""

    def __init__(self, slots: int, seconds: float) -> None:
        self.now_s, self._slots, self._seconds = 0.0, slots, seconds
        self._ends_s: dict[Check, float] = {}
        self.started: list[Check] = []

    @property
    def free(self) -> int:
        return self._slots - len(self._ends_s)

    def submit(self, check: Check) -> None:
        assert self.free > 0
        self.started.append(check)
        self._ends_s[check] = self.now_s + self._seconds

    def wait(self, timeout_s: float) -> list[CheckResult]:
        next_s = min(self._ends_s.values())
        if next_s > self.now_s + timeout_s:
            self.now_s += timeout_s
            return []
        self.now_s = next_s
        ended = [check for check, end_s in self._ends_s.items() if end_s == next_s]
        for check in ended:
            del self._ends_s[check]
        return [CheckResult(check, "passed", seconds=self._seconds) for check in ended]


def checks() -> list[Check]:
    """12 checks of the op "a" and 60 of "b", with two implementations each."""
    return in_order(
        Check(op, implementation, str(number), rank)
        for op, count in (("a", 12), ("b", 60))
        for rank, implementation in enumerate(("kernel", "reference"))
        for number in range(count)
    )


@pytest.mark.parametrize("budget_s", [0.0, 5.0, 95.0, 361.0, 1e4])
def test_a_slow_device_stays_within_the_budget(budget_s: float) -> None:
    device = SlowDevice(slots=4, seconds=10.0)
    found: list[CheckResult] = []
    left = run_checks(checks(), device, deadline_s=budget_s, clock=lambda: device.now_s, report=found.append)
    assert device.now_s <= min(budget_s, 360.0)
    assert len(found) == min(int(budget_s // 10) * 4, 144)
    assert {outcome.check for outcome in found} | set(left) == set(checks())


def test_chosen_implementations_come_first_and_all_ops_advance_at_the_same_rate() -> None:
    device = SlowDevice(slots=4, seconds=10.0)
    run_checks(checks(), device, deadline_s=95.0, clock=lambda: device.now_s, report=lambda outcome: None)
    assert {check.rank for check in device.started} == {0}
    assert sum(check.op == "a" for check in device.started) == pytest.approx(len(device.started) * 12 / 72, abs=1)
    ranks = [check.rank for check in checks()]
    assert ranks == sorted(ranks)


def test_implementations_are_in_the_order_of_choice() -> None:
    order = choice_order("norm", "tpu")
    assert order.index("mosaic_tpu") < order.index("reference")
    assert "mosaic_tpu" not in choice_order("norm", "gpu")


def test_the_plan_has_the_checks_of_every_implementation_once() -> None:
    planned = planned_checks("tpu", ["norm", "rope"])
    assert len({check.key for check in planned}) == len(planned)
    groups = {key: len(list(group)) for key, group in itertools.groupby(sorted(c.op for c in planned))}
    assert groups["norm"] > groups["rope"] > 10


def test_large_calls_come_before_small_ones_of_the_same_implementation() -> None:
    small, large = (Check("a", "kernel", f"{size}", 0, is_small=size == "small") for size in ("small", "large"))
    other = Check("b", "reference", "large", 1, is_small=False)
    assert in_order([other, small, large]) == [large, small, other]


def test_accelerators_have_the_calls_of_sizes_for_kernels_first() -> None:
    large = accelerator_checks("rope")
    found = contract_checks("rope", "gpu")
    assert [check for check, is_small in found if not is_small] == list(large)
    assert planned_checks("gpu", ["rope"])[0].name in map(str, large)
    assert all(is_small for _, is_small in contract_checks("rope", "cpu"))
