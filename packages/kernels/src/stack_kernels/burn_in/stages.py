"""Stages of a burn-in, in their order. Each runs the work without a recorded result in child processes."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_core.abi.plugins import registries
from stack_core.chips.machine import available_memory_bytes, usable_cores
from stack_kernels.bench.results import Results
from stack_kernels.burn_in.budget import Workers, workers_for
from stack_kernels.burn_in.checks import Check, CheckResult, planned_checks, run_checks
from stack_kernels.burn_in.children import run_child
from stack_kernels.burn_in.contracts import contracts_of
from stack_kernels.burn_in.device import LocalDevice, worker_environment
from stack_kernels.burn_in.pool import WorkerPool
from stack_kernels.burn_in.report import BurnInResults
from stack_kernels.burn_in.state import State
from stack_kernels.tuning.child import record_failure

__all__ = ["BurnIn", "Stage"]

Stage = Callable[[float], None]
"""A stage; its argument is the time of `time.monotonic` at which it ends."""

_MARGIN = 0.9  # part of a stage's time that a child plans for; the rest covers work in flight at the end
_MAX_CRASHES = 8
_MAX_HANG_S = 180.0
# A call that is younger when the time ends is slow rather than hanging, and is tried again by a resumed run.
_MIN_HANG_S = 60.0
_NO_RESULT = "no result when the time budget ended"
_SAID_EVERY = 20


@dataclass
class BurnIn:
    """A burn-in of one device.

    Attributes:
      out: output directory.
      device: the device.
      ops: names of the ops.
      state: record of the outcomes.
      found: results for the page.
    """

    out: Path
    device: LocalDevice
    ops: Sequence[str]
    state: State
    found: BurnInResults = field(init=False)

    def __post_init__(self) -> None:
        self.found = BurnInResults(self.device.heading)

    @property
    def stages(self) -> dict[str, Stage]:
        """Functions of the stages by name, in their order."""
        return {"contracts": self.check, "tuning": self.tune, "speeds": self.measure, "profile": self.profile}

    def check(self, end_s: float) -> None:
        """Runs the contract checks without a recorded result."""
        planned = planned_checks(self.device.platform, self.ops)
        results = self.state.results(planned)
        done = {result.check for result in results}
        left = [check for check in planned if check not in done]

        def report(result: CheckResult) -> None:
            self.state.add(result)
            results.append(result)
            if result.outcome in ("failed", "died"):
                _say(f"  {result.check.key}: {result.outcome}, {result.reason}")
            elif len(results) % _SAID_EVERY == 0:
                _say(f"  {len(results)}/{len(planned)} checks")

        if left:
            try:
                self._run_checks(left, end_s, report)
            except BenchmarkError as error:
                self.found.failures.append(f"contracts: {error}")
        self.found.contracts = contracts_of(planned, results)

    def _run_checks(self, checks: Sequence[Check], end_s: float, report: Callable[[CheckResult], None]) -> None:
        workers = self._workers()
        processes = min(workers.processes, len(checks))
        _say(f"  {len(checks)} checks in {processes} processes, {workers.threads} at the same time in each")
        with WorkerPool(
            ["-m", "stack_kernels.burn_in.contracts"],
            workers=processes,
            threads=workers.threads,
            # A check that hangs must leave time for its worker to go on.
            limit_s=min(_MAX_HANG_S, max((end_s - time.monotonic()) / 2, 1.0)),
            logs=self.out,
            environment=worker_environment(),
        ) as pool:
            run_checks(checks, pool, deadline_s=end_s, clock=time.monotonic, report=report)

    def _workers(self) -> Workers:
        return workers_for(
            self.device.platform,
            usable_cores(),
            memory_bytes=available_memory_bytes(),
            device_bytes=self.device.memory_bytes,
        )

    def tune(self, end_s: float) -> None:
        """Tunes the standard calls; a candidate that ends the process is recorded as failed."""
        table, trying = self.out / f"{self.device.file_name}.json", self.out / "trying.json"
        finished: list[dict[str, Any]] = []
        progress: dict[str, Any] = {}

        def on_message(message: dict[str, Any]) -> None:
            if "left_out" in message or "tuned" in message:
                finished.append(message)
            elif message["done"] != message["of"]:
                progress.update(message)
                _say(f"  {message['done']}/{message['of']} {message['what']}")

        threads, problem = max(usable_cores() - 1, 1), None
        for _ in range(_MAX_CRASHES):
            trying.unlink(missing_ok=True)
            finished.clear()
            left_s = end_s - time.monotonic()
            settings = {"out": str(table), "seconds": _MARGIN * left_s, "ops": list(self.ops), "threads": threads}
            problem, status = self._child("tuning", {**settings, "trying": str(trying)}, end_s, on_message)
            if status is None and trying.exists() and time.time() - trying.stat().st_mtime > _MIN_HANG_S:
                record_failure(trying, _NO_RESULT, table)
            if status is None or status >= 0:
                break
            if trying.exists():
                record_failure(trying, str(problem), table)
            else:
                threads = 1  # A compilation in some thread ended the process. In a single thread it will be recorded.
        if problem is not None:
            reached = f"after {progress['done']} of {progress['of']} calls, in {progress['what']}" if progress else ""
            self._note("tuning", problem, reached)
        self._add_tuned(table, finished)

    def _add_tuned(self, table: Path, finished: Sequence[dict[str, Any]]) -> None:
        self.found.table = table if table.exists() else None
        for message in finished:
            if "tuned" in message:
                self.found.tuned.append((message["tuned"], message["before"], message["choice"]))
                continue
            line = f"tuning {message['left_out']}: {message['reason']}"
            out_of_time = message["reason"].startswith(("out of time", "interrupted"))
            failed = message["reason"].startswith("the reference failed")
            lists = self.found
            (lists.failures if failed else lists.not_reached if out_of_time else lists.not_applicable).append(line)

    def measure(self, end_s: float) -> None:
        """Measures every implementation at the standard calls; a call that ends the process is not tried again."""
        path = self.out / f"{self.device.file_name}-speeds.json"
        threads, problem = max(usable_cores() - 1, 1), None
        not_reached: dict[str, None] = {}
        for _ in range(_MAX_CRASHES):
            in_flight: dict[str, float] = {}
            not_reached.clear()

            # The defaults bind the dictionary of this turn.
            def on_message(message: dict[str, Any], in_flight: dict[str, float] = in_flight) -> None:
                if "started" in message:
                    in_flight[message["started"]] = time.monotonic()
                elif "finished" in message:
                    in_flight.pop(message["finished"], None)
                elif "not_reached" in message:
                    not_reached[message["not_reached"]] = None
                else:
                    kind = "failed" if "failed" in message else "refused"
                    self.state.add_failure("speeds", message[kind], f"{kind}: {message['reason']}")

            skip = list(self.state.failures("speeds"))
            settings = {"out": str(path), "seconds": _MARGIN * (end_s - time.monotonic()), "ops": list(self.ops)}
            problem, status = self._child("speeds", {**settings, "threads": threads, "skip": skip}, end_s, on_message)
            hung = [name for name, started_s in in_flight.items() if time.monotonic() - started_s > _MIN_HANG_S]
            if status is None and len(in_flight) == len(hung) == 1:
                self.state.add_failure("speeds", hung[0], f"failed: {_NO_RESULT}")
            if status is None or status >= 0:
                break
            if len(in_flight) == 1:
                self.state.add_failure("speeds", next(iter(in_flight)), f"failed: {problem}")
            else:
                threads = 1
        if problem is not None:
            self._note("speeds", problem, "")
        self.found.not_reached += [f"speeds {name}" for name in not_reached]
        self._add_speeds(path)

    def _add_speeds(self, path: Path) -> None:
        self.found.speeds = Results.read(path) if path.exists() else None
        for name, outcome in self.state.failures("speeds").items():
            kind, _, reason = outcome.partition(": ")
            entries = self.found.failures if kind == "failed" else self.found.not_applicable
            entries.append(f"speeds {name}: {reason}")

    def profile(self, end_s: float) -> None:
        """Captures a profile of a step and writes its page."""
        if "profile run" not in registries.commands:
            self.found.not_applicable.append("profile: stack-profile is not installed")
            return
        capture, page = self.out / "profile", self.out / f"{self.device.file_name}-profile.html"
        run = ["profile", "run", "--out", str(capture), "-m", "stack_kernels.burn_in.standard"]
        for arguments in [] if page.exists() else [run, ["profile", "report", str(capture), "--out", str(page)]]:
            name = f"profile {arguments[1]}"
            ended = run_child(
                ["-m", "stack_core", *arguments],
                end_s,
                log=self.out / f"profile-{arguments[1]}.log",
                environment=worker_environment(),
            )
            if ended.problem:
                self._note(name, ended.problem, "")
                return
        self.found.profile = page

    def _child(
        self, stage: str, settings: dict[str, Any], end_s: float, on_message: Callable[[dict[str, Any]], None]
    ) -> tuple[str | None, int | None]:
        """Runs the module of a stage; returns its problem and its status."""
        tables = {"STACK_TUNED_TABLES": str(self.found.table or "")} if stage == "speeds" else {}
        ended = run_child(
            ["-m", f"stack_kernels.burn_in.{stage}", json.dumps(settings)],
            end_s,
            log=self.out / f"{stage}.log",
            on_message=on_message,
            environment={**worker_environment(), **tables},
        )
        return ended.problem, ended.status

    def _note(self, name: str, problem: str, details: str) -> None:
        entries = self.found.not_reached if re.match("the time budget", problem) else self.found.failures
        entries.append(f"{name}: {problem}{f' {details}' if details else ''}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
