"""`stack bench burn-in`: contracts, tuning, speeds and a profile on a new chip."""

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_core.abi.errors import BenchmarkError, UnknownName, nearest

__all__ = ["burn_in"]

_MAX_PRINTED = 20


def burn_in(
    *,
    out: Path = Path("burn-in"),
    minutes: float = 10.0,
    ops: str = "",
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    chip: str = "",
) -> None:
    """Try every kernel on this device: stack bench burn-in --out h100

    Checks each op's contract against float64 in one worker process per core, tunes the standard calls, measures every
    implementation in turns with core's reference, and captures a profile. Implementations that core chooses come first.
    A crash or a hang costs only one check or call. Writes OUT/<chip>.md, the tuned table, the speeds and
    the profile; the page has a status for each implementation: passed, failed or not tested. Exits with status 1 unless
    everything was reached and passed. The same command continues a burn-in that was interrupted or ran out of time.
    Without an accelerator it tries the CPU implementations.

    Args:
      out: output directory, empty or with the burn-in to continue.
      minutes: duration, at least 1.
      ops: comma-separated names of ops; by default all that have standard calls.
      dry_run: print the plan and run nothing.
      chip: with --dry-run, name of a chip, which need not be present, such as h100 or v6e.
    """
    chosen = _chosen(ops)
    if not 1 <= minutes < float("inf"):
        raise BenchmarkError(f"--minutes is {minutes:g}; expected 1 or more.")
    if chip and not dry_run:
        raise BenchmarkError(
            "--chip names a chip to plan for; add --dry-run. A burn-in runs on the chip of this machine."
        )
    if dry_run:
        from stack_kernels.burn_in.plan import print_plan

        print_plan(chip, chosen, 60 * minutes)
        return
    started_s = time.monotonic()

    from stack_kernels.burn_in.budget import stage_s
    from stack_kernels.burn_in.device import find_device
    from stack_kernels.burn_in.report import markdown
    from stack_kernels.burn_in.stages import BurnIn
    from stack_kernels.burn_in.state import State, check_output

    check_output(out)
    out.mkdir(parents=True, exist_ok=True)
    # Before anything is written: a refused start must leave an empty directory usable.
    device = find_device()
    page = out / f"{device.file_name}.md"
    with State(out, f"{device.identity}, ops {', '.join(chosen)}") as state:
        run = BurnIn(out, device, chosen, state)
        for name, stage in run.stages.items():
            share_s = stage_s(name, started_s + 60 * minutes - time.monotonic())
            print(f"{name}, for at most {share_s:.0f} s", file=sys.stderr, flush=True)
            stage(time.monotonic() + share_s)
            page.write_text(markdown(run.found))
    for defect in run.found.defects[:_MAX_PRINTED]:
        print(defect)
    if len(run.found.defects) > _MAX_PRINTED:
        print(f"and {len(run.found.defects) - _MAX_PRINTED} more in the page")
    print(f"Wrote {page}: {run.found.summary}.")
    if run.found.defects:
        sys.exit(1)


def _chosen(listing: str) -> list[str]:
    from stack_kernels.bench.cases import CASES

    known = sorted({case.op for case in CASES})
    names = list(dict.fromkeys(name.strip() for name in listing.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UnknownName(f"Unknown op {name!r}.{nearest(name, known)} There are: {', '.join(known)}.")
    return names or known
