"""`stack bench burn-in`: contracts, tuning, speeds and a profile on a new chip."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stack_core.abi.errors import BenchmarkError, UnknownName, nearest
from stack_core.abi.plugins import registries

if TYPE_CHECKING:
    from stack_kernels.burn_in.report import BurnInResults

__all__ = ["burn_in"]

_SHARES = {"contracts": 0.4, "tuning": 0.3, "speeds": 0.2, "profile": 0.1}
_MARGIN = 0.8  # part of its share that a stage plans for; the rest covers start-up and work in flight at the deadline


def burn_in(*, out: Path = Path("burn-in"), budget_s: float = 600.0, ops: str = "") -> None:
    """Try every kernel on this device: stack bench burn-in --out h100

    Runs each op's contract against float64, tunes the standard calls, measures every implementation in turns with
    core's reference, and captures a profile. The work runs in child processes: a check that crashes costs only its own
    row, a check that hangs costs the rest of its op, and in the other stages a crash costs the rest of the stage.
    Writes OUT/<chip>.md, the tuned table, the results and the profile. Exits with status 1 if a contract is broken.
    Without an accelerator it tries the CPU implementations.

    Args:
      out: output directory; must not contain another burn-in.
      budget_s: approximate duration in seconds, at least 60.
      ops: comma-separated names of ops; by default all that have standard calls.
    """
    chosen = _chosen(ops)
    if not budget_s >= 60:
        raise BenchmarkError(f"Given is a budget of {budget_s} s; expected 60 or more.")
    if out.exists() and any(out.iterdir()):
        raise BenchmarkError(f"{str(out)!r} is not empty. Name another directory.")
    out.mkdir(parents=True, exist_ok=True)

    from stack_kernels.bench.run import results
    from stack_kernels.burn_in.report import BurnInResults, markdown

    found = BurnInResults(results(()).heading)
    name = _file_name()
    stages = {"contracts": _contracts, "tuning": _tune, "speeds": _measure, "profile": _profile}
    end_s, shares = time.monotonic() + budget_s, list(_SHARES.values())
    for stage, run in stages.items():
        # Of the remaining time: a stage that ends early leaves its rest to later stages.
        share_s = (end_s - time.monotonic()) * _SHARES[stage] / sum(shares)
        shares.pop(0)
        _say(f"{stage}, for at most {share_s:.0f} s")
        run(found, out, name, chosen, share_s)
        (out / f"{name}.md").write_text(markdown(found))
    print(f"Wrote {out / f'{name}.md'}: checks failed: {len(found.failures)}, not reached: {len(found.missing)}.")
    for failure in found.failures:
        print(f"failed: {failure}")
    if found.failures:
        sys.exit(1)


def _chosen(listing: str) -> list[str]:
    from stack_kernels.bench.cases import CASES

    known = sorted({case.op for case in CASES})
    names = list(dict.fromkeys(name.strip() for name in listing.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UnknownName(f"Unknown op {name!r}.{nearest(name, known)} There are: {', '.join(known)}.")
    return names or known


def _file_name() -> str:
    from stack_core.chips import current_chip
    from stack_kernels.tuning.tables import ChipName

    return Path(ChipName.of(current_chip()).file_name).stem


def _contracts(found: "BurnInResults", out: Path, name: str, ops: list[str], share_s: float) -> None:
    from stack_kernels.burn_in.contracts import contract_of

    end_s = time.monotonic() + share_s
    for place, op in enumerate(ops):
        deadline_s = time.monotonic() + (end_s - time.monotonic()) / (len(ops) - place)
        contracts, problem = contract_of(op, deadline_s, log=out / "contracts.log")
        found.contracts += contracts
        found.missing += [f"contract of {problem}"] if problem else []
        tried = sum(sum(each.outcomes.values()) for each in contracts)
        _say(f"  {op}: {tried} checks, {sum(len(each.problems) for each in contracts)} failed")


def _tune(found: "BurnInResults", out: Path, name: str, ops: list[str], share_s: float) -> None:
    from stack_kernels.burn_in.children import run_child

    table, deadline_s = out / f"{name}.json", time.monotonic() + share_s
    left_out: list[str] = []

    def on_message(message: dict[str, object]) -> None:
        if "left_out" in message:
            left_out.append(f"tuning {message['left_out']}")
        elif message["done"] != message["of"]:
            _say(f"  {message['done']}/{message['of']} {message['what']}")

    arguments = ["-m", "stack_kernels.burn_in.tuning", str(table), str(_MARGIN * share_s), ",".join(ops)]
    ended = run_child(arguments, deadline_s, log=out / "tuning.log", on_message=on_message)
    found.table = table if table.exists() else None
    found.missing += left_out + ([f"tuning: {ended.problem}"] if ended.problem else [])


def _measure(found: "BurnInResults", out: Path, name: str, ops: list[str], share_s: float) -> None:
    from stack_kernels.bench.results import Results
    from stack_kernels.burn_in.children import run_child

    path = out / f"{name}-speeds.json"
    arguments = ["-m", "stack_kernels.burn_in.speeds", str(path), str(_MARGIN * share_s), ",".join(ops)]
    tables = {"STACK_TUNED_TABLES": str(found.table) if found.table else ""}
    left_out: list[str] = []

    def on_message(message: dict[str, object]) -> None:
        left_out.append(f"speeds: {message['left_out']}")

    ended = run_child(
        arguments, time.monotonic() + share_s, log=out / "speeds.log", on_message=on_message, environment=tables
    )
    found.speeds = Results.read(path) if path.exists() else None
    found.missing += left_out + ([f"speeds: {ended.problem}"] if ended.problem else [])


def _profile(found: "BurnInResults", out: Path, name: str, ops: list[str], share_s: float) -> None:
    from stack_kernels.burn_in.children import run_child

    if "profile run" not in registries.commands:
        found.missing.append("profile: stack-profile is not installed")
        return
    deadline_s, capture, page = time.monotonic() + share_s, out / "profile", out / f"{name}-profile.html"
    stack = ["-m", "stack_core", "profile"]
    for arguments in (
        ["run", "--out", str(capture), "-m", "stack_kernels.burn_in.standard"],
        ["report", str(capture), "--out", str(page)],
    ):
        ended = run_child([*stack, *arguments], deadline_s, log=out / "profile.log")
        if ended.problem:
            found.missing.append(f"profile: {ended.problem}")
            return
    found.profile = page


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
