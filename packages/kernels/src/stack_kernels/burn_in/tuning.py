"""Tunes the standard calls. `python -m stack_kernels.burn_in.tuning SETTINGS`.

SETTINGS is a JSON object: `out`, the table's file; `seconds`, `ops`, `threads`; and `trying`, the file that records the
current candidate. Prints JSON objects: {"done": jobs, "of": jobs, "what": job}, and at the end {"left_out": job,
"reason": ...} and {"tuned": job, "choice": ...}.
"""

import json
import os
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Tunes as the settings on the command line say, and reports progress."""
    from stack_kernels.burn_in.children import leave_with_parent
    from stack_kernels.burn_in.standard import shapes, standard_calls
    from stack_kernels.tuning.search import tune

    settings = json.loads(sys.argv[1])
    leave_with_parent()

    def say(finished: int, total: int, job: str) -> None:
        print(json.dumps({"done": finished, "of": total, "what": job}), flush=True)

    report = tune(
        standard_calls,
        shapes(settings["ops"]),
        budget_s=settings["seconds"],
        out=settings["out"],
        progress=say,
        trying=Path(settings["trying"]),
        threads=settings["threads"],
    )
    for job in report.jobs:
        if job.skipped:
            print(json.dumps({"left_out": str(job), "reason": job.skipped}), flush=True)
        else:
            print(json.dumps({"tuned": str(job), "before": str(job.before), "choice": str(job.after)}), flush=True)
    sys.stdout.flush()
    # Compilations that were not waited for would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
