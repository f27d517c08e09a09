"""Results of contract checks against float64, and the worker process of the checks.

`python -m stack_kernels.burn_in.contracts THREADS` reads checks as JSON lines and prints a JSON object for each.
"""

import functools
import json
import os
import sys
import threading
import time
import unittest
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stack_kernels.burn_in.checks import Check, CheckResult, contract_checks, platform_of

__all__ = ["Contract", "contracts_of", "main", "run_check"]

_ENOUGH = 0.9
"""Fraction of an implementation's checks that must have run for "passed"."""


@dataclass(frozen=True)
class Contract:
    """Results of an implementation in the checks of its op.

    Attributes:
      op: name of the op.
      implementation: name of the implementation.
      planned: number of its checks.
      outcomes: number of checks that "passed", "refused", "failed", or "died" with the process.
      problems: failed and died checks, one line each.
      refusal: most frequent reason of refused checks, "" without one.
    """

    op: str
    implementation: str
    planned: int
    outcomes: Counter[str]
    problems: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}/{self.implementation}"

    @property
    def not_reached(self) -> int:
        return self.planned - self.outcomes.total()

    @property
    def status(self) -> str:
        """Status: "failed" with a failed check, "passed" if at least one passed and 90% ran, else "not tested"."""
        if self.outcomes["failed"] or self.outcomes["died"]:
            return "failed"
        enough = self.outcomes.total() >= _ENOUGH * self.planned
        return "passed" if self.outcomes["passed"] and enough else "not tested"

    @property
    def untested_reason(self) -> str:
        """Reason of the status "not tested"."""
        if self.not_reached > (1 - _ENOUGH) * self.planned:
            return f"the time did not reach {self.not_reached} of {self.planned} checks"
        return f"it refused all {self.outcomes['refused']} checks; most often: {self.refusal}"


def contracts_of(planned: Sequence[Check], outcomes: Iterable[CheckResult]) -> list[Contract]:
    """Combines outcomes by implementation, in alphabetical order."""
    found: dict[tuple[str, str], list[CheckResult]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.check.op, outcome.check.implementation), []).append(outcome)
    totals = Counter((check.op, check.implementation) for check in planned)
    return [_contract(*name, totals[name], found.get(name, [])) for name in sorted(totals)]


def _contract(op: str, implementation: str, planned: int, outcomes: Sequence[CheckResult]) -> Contract:
    refusals = Counter(each.reason for each in outcomes if each.outcome == "refused")
    return Contract(
        op,
        implementation,
        planned,
        Counter(each.outcome for each in outcomes),
        tuple(f"{each.check.name}: {each.reason}" for each in outcomes if each.outcome in ("failed", "died")),
        refusals.most_common(1)[0][0] if refusals else "",
    )


def run_check(op: str, implementation: str, check: str) -> dict[str, Any]:
    """Runs one check and returns its outcome, its reason and its seconds."""
    from stack_core.abi.plugins import registries

    started_s = time.monotonic()
    outcome, reason = "passed", ""
    try:
        _checks(op)[check](registries.ops[f"{op}/{implementation}"])
    except unittest.SkipTest as error:
        outcome, reason = "refused", _refusal(str(error), implementation)
    except Exception as error:  # any failure of a kernel on a new chip is a finding
        outcome, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - started_s, 3)}


@functools.cache
def _checks(op: str) -> Mapping[str, Any]:
    import jax

    return {str(check): check for check, _ in contract_checks(op, platform_of(jax.default_backend()))}


def _refusal(message: str, implementation: str) -> str:
    """Returns the implementation's own line of a refusal, which lists the reasons of all implementations."""
    own = [line.strip() for line in message.splitlines() if line.strip().startswith(f"{implementation}: ")]
    return own[0].removeprefix(f"{implementation}: ")[:300] if own else " ".join(message.split())[:300]


def main() -> None:
    """Runs the checks that come as lines of standard input, until it closes."""
    threads = int(sys.argv[1])
    import jax

    # By default accelerators round fp32 operands to TF32 or bf16, which cannot match float64.
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.devices()
    lock = threading.Lock()

    def say(message: Mapping[str, Any]) -> None:
        with lock:
            print(json.dumps(message), flush=True)

    def run(request: Mapping[str, str]) -> None:
        say({"key": request["key"], **run_check(request["op"], request["implementation"], request["check"])})

    say({"ready": True})
    with ThreadPoolExecutor(threads) as pool:
        for line in sys.stdin:
            pool.submit(run, json.loads(line))
        # The parent has ended: nobody reads the outcome of what still runs.
        os._exit(1)


if __name__ == "__main__":
    main()
