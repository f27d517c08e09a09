"""Tunes the standard calls. `python -m stack_kernels.burn_in.tuning TABLE SECONDS OPS`."""

import json
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Tunes the ops given on the command line and reports progress."""
    from stack_kernels.burn_in.standard import shapes, standard_calls
    from stack_kernels.tuning.search import tune

    table, budget_s, ops = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split(",")

    def say(finished: int, total: int, job: str) -> None:
        print(json.dumps({"done": finished, "of": total, "what": job}), flush=True)

    report = tune(standard_calls, shapes(ops), budget_s=budget_s, out=table, progress=say)
    for job in report.jobs:
        if job.skipped:
            print(json.dumps({"left_out": f"{job}: {job.skipped}"}), flush=True)


if __name__ == "__main__":
    main()
