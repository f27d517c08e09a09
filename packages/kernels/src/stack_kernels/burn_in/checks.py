"""The contract checks of a burn-in, in the order in which they run, and the loop that runs them within a deadline."""

import abc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import implementations_of, is_installed, preferred
from stack_core.testing import OpCheck, accelerator_checks, op_checks

__all__ = [
    "Check",
    "CheckResult",
    "Pool",
    "choice_order",
    "contract_checks",
    "in_order",
    "planned_checks",
    "platform_of",
    "run_checks",
]


@dataclass(frozen=True)
class Check:
    """One check of one implementation.

    Attributes:
      op: name of the op.
      implementation: name of the implementation.
      name: name of the check in the op's contract suite.
      rank: place of the implementation in the order of choice on this platform; 0 is chosen if it supports the call.
      is_small: whether the call is too small for kernels of accelerators, most of which refuse it.
    """

    op: str
    implementation: str
    name: str
    rank: int
    is_small: bool = True

    @property
    def key(self) -> str:
        return f"{self.op}/{self.implementation} {self.name}"


@dataclass(frozen=True)
class CheckResult:
    """CheckResult of a check.

    Attributes:
      check: the check.
      outcome: "passed", "refused", "failed", or "died" if the check ended its process.
      reason: reason of any outcome but "passed".
      seconds: duration.
    """

    check: Check
    outcome: str
    reason: str = ""
    seconds: float = 0.0


class Pool(abc.ABC):
    """Runs checks concurrently, in worker processes or in a test's simulation."""

    @property
    @abc.abstractmethod
    def free(self) -> int:
        """Number of checks that can start now."""

    @abc.abstractmethod
    def submit(self, check: Check) -> None:
        """Starts a check."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> list[CheckResult]:
        """Returns new outcomes; an empty list if there were none within the timeout, or if `free` changed.

        Raises:
          BenchmarkError: every worker has ended.
        """


def planned_checks(platform: str, ops: Sequence[str]) -> list[Check]:
    """Lists the checks of every installed implementation for a platform, in their order."""
    return in_order(
        Check(op, name, str(check), rank, is_small)
        for op in ops
        for rank, name in enumerate(choice_order(op, platform))
        for check, is_small in contract_checks(op, platform)
    )


def contract_checks(op: str, platform: str) -> list[tuple[OpCheck, bool]]:
    """Lists an op's checks on a platform, each with `Check.is_small`.

    These are the covering selection of its contract, and on accelerators all calls of sizes for kernels.
    """
    covering = [(check, True) for check in op_checks(op) if check.is_covering]
    if platform == "cpu":
        return covering
    return [*((check, False) for check in accelerator_checks(op)), *covering]


def platform_of(backend: str) -> str:
    """Returns the platform of implementations, "cpu", "gpu" or "tpu", of a backend of JAX."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)


def choice_order(op: str, platform: str) -> list[str]:
    """Lists the installed implementations of an op for a platform, in core's order of preference."""
    left: dict[str, OpImplementation] = {
        name: each
        for name, each in implementations_of(op).items()
        if is_installed(each) and platform in (each.platforms or (platform,))
    }
    order: list[str] = []
    while left:
        first = preferred(left)[0]
        order.append(first)
        del left[first]
    return order


def in_order(checks: Iterable[Check]) -> list[Check]:
    """Sorts checks by the rank of their implementation, large calls first; among equals all ops advance at one rate.

    If time runs out, the same fraction of every op's checks has then run, and chosen implementations before others.
    """
    checks = list(checks)
    totals = Counter((check.rank, check.is_small, check.op) for check in checks)
    places: Counter[tuple[int, bool, str]] = Counter()
    progress: dict[Check, float] = {}
    for check in checks:
        group = check.rank, check.is_small, check.op
        places[group] += 1
        progress[check] = places[group] / totals[group]
    return sorted(checks, key=lambda check: (check.rank, check.is_small, progress[check]))


def run_checks(
    checks: Sequence[Check],
    pool: Pool,
    *,
    deadline_s: float,
    clock: Callable[[], float],
    report: Callable[[CheckResult], Any],
) -> list[Check]:
    """Runs checks in their order until all have a result or `deadline_s` of `clock` has come.

    Returns:
      The checks without a result.

    Raises:
      BenchmarkError: every worker has ended.
    """
    waiting = deque(checks)
    left = dict.fromkeys(checks)
    while left and (remaining_s := deadline_s - clock()) > 0:
        while waiting and pool.free > 0:
            pool.submit(waiting.popleft())
        for outcome in pool.wait(remaining_s):
            left.pop(outcome.check, None)
            report(outcome)
    return list(left)
