"""The contract of an op on this device, against float64. `python -m stack_kernels.burn_in.contracts OP SKIP`.

Prints a JSON object before each check, which identifies a check that crashes the process, and another with its outcome.
"""

import json
import sys
import time
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_kernels.burn_in.children import run_child

__all__ = ["Contract", "contract_of", "implementations_for", "main"]


@dataclass(frozen=True)
class Contract:
    """Results of an implementation in the checks of its op.

    Attributes:
      op: name of the op.
      implementation: name of the implementation.
      outcomes: number of checks that "passed", "refused", "failed", or "died" with the process.
      problems: failed and died checks, one line each.
    """

    op: str
    implementation: str
    outcomes: Counter[str]
    problems: tuple[str, ...]


def implementations_for(op: str, platform: str) -> list[str]:
    """Lists the installed implementations of an op that run on a platform, in the order of the registry."""
    from stack_core.ops.building import implementations_of, is_installed

    found = implementations_of(op).items()
    return [name for name, each in found if is_installed(each) and platform in (each.platforms or (platform,))]


def contract_of(op: str, deadline_s: float, *, log: Path) -> tuple[list[Contract], str | None]:
    """Runs an op's checks in child processes; returns the results per implementation, and a note if it stopped early.

    A check that crashes its child counts as "died", and another child continues with the next check.
    """
    rows: list[dict[str, Any]] = []
    skip = 0
    while True:
        started: list[dict[str, Any]] = []
        before = len(rows)

        # The default binds the list of this turn.
        def on_message(message: dict[str, Any], started: list[dict[str, Any]] = started) -> None:
            (rows if "outcome" in message else started).append(message)

        result = run_child(["-m", __spec__.name, op, str(skip)], deadline_s, log=log, on_message=on_message)
        finished = len(rows) - before
        if result.problem is None:
            return _contracts(op, rows), None
        if result.status is None or len(started) == finished:  # out of time, or died between two checks
            return _contracts(op, rows), f"{op}: {result.problem}"
        rows.append({**started[-1], "outcome": "died", "reason": result.problem})
        skip += finished + 1


def _contracts(op: str, rows: Sequence[dict[str, Any]]) -> list[Contract]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["implementation"], []).append(row)
    return [
        Contract(
            op,
            name,
            Counter(row["outcome"] for row in own),
            tuple(f"{row['check']}: {row['reason']}" for row in own if row["outcome"] in ("failed", "died")),
        )
        for name, own in by_name.items()
    ]


def _outcomes(op: str, skip: int) -> Iterator[dict[str, Any]]:
    import jax

    from stack_core.abi.plugins import registries
    from stack_core.testing import op_checks

    # By default accelerators round fp32 operands to TF32 or bf16, which cannot match float64.
    jax.config.update("jax_default_matmul_precision", "highest")
    planned = [
        (name, check)
        for name in implementations_for(op, jax.default_backend())
        for check in op_checks(op)
        if check.is_covering
    ]
    for name, check in planned[skip:]:
        row = {"implementation": name, "check": str(check)}
        yield row
        started_s = time.monotonic()
        outcome, reason = "passed", ""
        try:
            check(registries.ops[f"{op}/{name}"])
        except unittest.SkipTest as error:
            outcome, reason = "refused", str(error)
        except Exception as error:  # any failure of a kernel on a new chip is a finding
            outcome, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {**row, "outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - started_s, 3)}


def main() -> None:
    """Checks the op given on the command line, skipping the first checks."""
    op, skip = sys.argv[1], int(sys.argv[2])
    for row in _outcomes(op, skip):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
