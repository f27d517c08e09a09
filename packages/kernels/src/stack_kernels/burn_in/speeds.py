"""Measures every implementation at the standard calls. `python -m stack_kernels.burn_in.speeds OUT SECONDS OPS`.

Writes the results after each call: if the device breaks, only the remaining calls are lost. Prints a JSON object for
each call that failed.
"""

import json
import sys
import time
from pathlib import Path

__all__ = ["main"]

_DTYPE = "bfloat16"
_ROUNDS = 15


def main() -> None:
    """Measures the ops given on the command line."""
    import jax

    from stack_core.abi.errors import BenchmarkError
    from stack_kernels.bench.results import Row
    from stack_kernels.bench.run import measured, results, tasks
    from stack_kernels.burn_in.contracts import implementations_for
    from stack_kernels.burn_in.standard import standard_cases

    out, budget_s, ops = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split(",")
    end_s = time.monotonic() + budget_s
    rows: list[Row] = []
    planned = [
        task
        for case in standard_cases()
        if case.op in ops
        for task in tasks(
            [case], [_DTYPE], ["", *_without_reference(implementations_for(case.op, jax.default_backend()))]
        )
    ]
    for place, task in enumerate(planned):
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            sys.exit(f"the time budget left {len(planned) - place} of {len(planned)} calls")
        try:
            # Calls that end early leave their time to later ones.
            row = measured(task, rounds=_ROUNDS, budget_s=remaining_s / (len(planned) - place))
        except Exception as error:  # any failure of a kernel on a new chip is a finding
            reason = str(error) if isinstance(error, BenchmarkError) else f"{task}: {type(error).__name__}: {error}"
            print(json.dumps({"left_out": " ".join(reason.split())[:300]}), flush=True)
            continue
        if isinstance(row, Row):
            rows.append(row)
            results(rows).write(out)


def _without_reference(names: list[str]) -> list[str]:
    return [name for name in names if name != "reference"]


if __name__ == "__main__":
    main()
