"""The plan of a burn-in for a chip that need not be present.

`python -m stack_kernels.burn_in.plan CHIP SECONDS OPS CORES` prints it as JSON objects, one line each. It runs in a
child process on the CPU, because tracing starts JAX's backend, which would take a GPU's memory.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stack_core.abi.chips import Chip
from stack_core.abi.errors import BenchmarkError
from stack_core.abi.plugins import registries
from stack_core.chips.devices import row_name
from stack_core.chips.machine import usable_cores
from stack_kernels.burn_in.budget import STAGES, Workers, stage_s, workers_for
from stack_kernels.burn_in.checks import planned_checks
from stack_kernels.burn_in.children import run_child
from stack_kernels.burn_in.device import find_device

__all__ = ["main", "plan_lines", "print_plan"]

_CORES = 16
"""Cores assumed next to a chip that is not in this machine."""
_TIMEOUT_S = 600.0
# Seconds of one check in one process: 2-3 on an H100, where compilers for GPUs take most of it; 0.5-0.8 on a CPU.
_CHECK_S = {"cpu": 0.7, "gpu": 2.5, "tpu": 2.5}
# Seconds to trace, lower and compile one program of the standard calls.
_PROGRAM_S = {"cpu": 2.0, "gpu": 4.0, "tpu": 4.0}
# Seconds of a check and of a program in which Python's lock is held, measured on a CPU; threads take turns in them.
_LOCKED_CHECK_S = 0.2
_LOCKED_PROGRAM_S = 0.4
# Seconds of the rounds of one call, and of one tuned call.
_ROUNDS_S = 0.5
_JOB_S = 1.5
_PROFILE_S = 40.0


def print_plan(chip_name: str, ops: Sequence[str], budget_s: float) -> None:
    """Prints the plan for a chip of the registry `chips`, or for this machine's chip if the name is empty.

    Raises:
      UnknownName: the chip is not registered.
      HardwareError: no name is given, and JAX cannot use this machine's device.
      BenchmarkError: this machine's chip is not registered, or the calls cannot be traced.
    """
    cores = _CORES if chip_name else usable_cores()
    if chip_name:
        registries.chips[chip_name]  # raises before a process starts
    else:
        kind = find_device().kinds[0]
        chip_name = row_name(kind) or ""
        if not chip_name:
            raise BenchmarkError(f"{kind!r} is not a registered chip. Name one with --chip; `stack chips` lists them.")
    with TemporaryDirectory() as folder:
        ended = run_child(
            ["-m", __spec__.name, chip_name, str(budget_s), ",".join(ops), str(cores)],
            time.monotonic() + _TIMEOUT_S,
            log=Path(folder, "plan.log"),
            on_message=lambda message: print(message["line"], flush=True),
            environment={"JAX_PLATFORMS": "cpu"},
        )
    if ended.problem:
        raise BenchmarkError(f"The plan for {chip_name} ended with {ended.problem}")


def plan_lines(chip: Chip, ops: Sequence[str], budget_s: float, cores: int) -> Iterator[str]:
    """Yields the lines of the plan: checks, tuned calls and measured calls in their order, with expected seconds."""
    from stack_kernels.tuning.lookup import chip_platform

    platform = chip_platform(chip.kind)
    workers = workers_for(platform, cores, memory_bytes=None, device_bytes=chip.hbm_bytes)
    yield f"Plan for {chip.kind}, {budget_s / 60:g} minutes on {cores} cores; expected seconds are estimates."
    shares: dict[str, float] = {}
    for name in STAGES:
        shares[name] = stage_s(name, budget_s - sum(shares.values()))
    yield from _contracts(platform, ops, workers, shares["contracts"])
    yield from _tuning(platform, ops, cores, shares["tuning"])
    yield from _speeds(platform, ops, cores, shares["speeds"])
    yield from _profile(shares["profile"])


def _contracts(platform: str, ops: Sequence[str], workers: Workers, share_s: float) -> Iterator[str]:
    checks = planned_checks(platform, ops)
    check_s = max(_CHECK_S[platform] / workers.threads, _LOCKED_CHECK_S)
    expected_s = STAGES["contracts"][0] + len(checks) * check_s / workers.processes
    counts = Counter((check.rank, check.op, check.implementation) for check in checks)
    yield _heading("contracts", f"{len(checks)} checks, {_describe(workers)}", expected_s, share_s)
    for (rank, op, implementation), count in sorted(counts.items()):
        yield f"  {op}/{implementation}: {count} checks{', chosen first' if rank == 0 else ''}"


def _tuning(platform: str, ops: Sequence[str], cores: int, share_s: float) -> Iterator[str]:
    from stack_kernels.burn_in.standard import shapes, standard_calls
    from stack_kernels.tuning.search import planned_jobs

    jobs = planned_jobs(standard_calls, shapes(ops))
    tuned = [(job, names) for job, names in jobs if len(names) > 1]
    programs = sum(len(names) for _, names in tuned)
    expected_s = STAGES["tuning"][0] + _compile_s(platform, programs, cores) + len(tuned) * _JOB_S
    yield _heading("tuning", f"{len(tuned)} calls, {programs} candidates", expected_s, share_s)
    for job, names in tuned:
        yield f"  {job}: {', '.join(f'{name} x {count}' for name, count in Counter(names).items())}"
    rest = Counter(job.case.shape.op for job, names in jobs if len(names) < 2)
    if rest:
        yield f"  nothing to choose: {', '.join(f'{op} x {count}' for op, count in rest.items())}"


def _speeds(platform: str, ops: Sequence[str], cores: int, share_s: float) -> Iterator[str]:
    from stack_kernels.burn_in.speeds import waves

    planned = [task for wave in waves(ops, platform) for task in wave]
    calls = {(task.case.op, task.case.name, task.direction) for task in planned}
    # The reference of each call is a program, too.
    expected_s = STAGES["speeds"][0] + _compile_s(platform, len(planned) + len(calls), cores) + len(planned) * _ROUNDS_S
    yield _heading("speeds", f"{len(planned)} calls", expected_s, share_s)
    names: dict[str, list[str]] = {}
    for task in planned:
        names.setdefault(f"{task.case.op} {task.case.name} {task.direction}", []).append(task.asked or "chosen")
    for call, asked in names.items():
        yield f"  {call}: {', '.join(asked)}"


def _profile(share_s: float) -> Iterator[str]:
    from stack_kernels.burn_in.standard import PROFILED

    if "profile run" in registries.commands:
        yield _heading("profile", f"a step of {', '.join(PROFILED)}", _PROFILE_S, share_s)
    else:
        yield "profile: left out, stack-profile is not installed"


def _heading(stage: str, work: str, expected_s: float, share_s: float) -> str:
    fits = "" if expected_s <= share_s else ", more than fits: raise --minutes"
    return f"{stage}: {work}, about {expected_s:.0f} s of {share_s:.0f} s{fits}"


def _describe(workers: Workers) -> str:
    if workers.threads > 1:
        return f"in 1 process of {workers.threads} threads"
    return f"in {workers.processes} process{'es' if workers.processes > 1 else ''}"


def _compile_s(platform: str, programs: int, cores: int) -> float:
    return programs * max(_LOCKED_PROGRAM_S, _PROGRAM_S[platform] / max(cores - 1, 1))


def main() -> None:
    """Prints the plan for the chip, budget, ops and cores on the command line."""
    from stack_core.chips import use_chip

    name, budget_s, ops, cores = sys.argv[1:]
    row = registries.chips[name]
    chip = row() if callable(row) else row
    with use_chip(chip):
        for line in plan_lines(chip, ops.split(","), float(budget_s), int(cores)):
            print(json.dumps({"line": line}), flush=True)


if __name__ == "__main__":
    main()
