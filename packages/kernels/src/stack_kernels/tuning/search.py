"""Measures every implementation and config of the op calls in a function on the local device."""

import contextlib
import datetime
import functools
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from stack_core import ops
from stack_core.abi.errors import StackError, TuningError
from stack_core.abi.ops import OpCall
from stack_core.chips import Chip, current_chip, use_chip
from stack_core.commands.named_function import tracing
from stack_core.ops import Explanation
from stack_kernels.tuning.ahead import compile_ahead
from stack_kernels.tuning.candidates import Candidate, Trial, WrongNumbers, candidates_of
from stack_kernels.tuning.costs import estimate_s, roofline_s
from stack_kernels.tuning.lookup import OneTable
from stack_kernels.tuning.measure import MIN_ROUNDS, Timing, measure
from stack_kernels.tuning.neighbours import Neighbours
from stack_kernels.tuning.shapes import shape_of
from stack_kernels.tuning.sources import MEASURED
from stack_kernels.tuning.tables import Case, ChipName, Measurement, Table, encoded_config, local_table_path

__all__ = ["Job", "Progress", "TuneReport", "planned_jobs", "tune"]

Progress = Callable[[int, int, str], None]
"""Called with (jobs done, total jobs, current job)."""

_MIN_S = 3.0
# Part of a job's time after which no further candidate is compiled; the rest is for the rounds.
_TRYING_SHARE = 0.6
# Programs that are compiled before the next jobs are timed: enough to keep the threads busy until the slowest is done.
_PROGRAMS_A_THREAD = 3
_CANDIDATES_AHEAD = 8
_MESH_OPS = (
    "collective_matmul",
    "exchange",
    "ring_attention",
)  # these need the program's mesh, inside shard_map
_PACKAGES = ("jax", "jaxlib", "stack-core", "stack-kernels")


@dataclass(frozen=True)
class Job:
    """One direction of a group of identical calls, and its result.

    Attributes:
      case: kind and direction of the call, as in tables.
      call: a representative of the calls.
      calls: number of executions in one call of the function.
      sources: source lines of the calls.
      before: candidate chosen before tuning.
      after: candidate chosen now.
      reason: reason for the current choice.
      cached: True if every measurement was already known.
      skipped: reason why it was not measured, or not completely.
      decides: True if the choice depends on this job; False for a forward pass if all its candidates were timed
        together with their gradients.
    """

    case: Case
    call: OpCall = field(repr=False)
    calls: int
    sources: tuple[str, ...]
    before: Candidate
    after: Candidate
    reason: str = ""
    cached: bool = False
    skipped: str = ""
    decides: bool = True

    def __str__(self) -> str:
        return f"{self.case.shape.op} {self.case.direction} {self.case.shape}"


@dataclass(frozen=True)
class TuneReport:
    """Result of `tune`.

    Attributes:
      table: all measurements of the chip, for `stack_kernels.tuned`.
      path: file of the table.
      jobs: the tuned calls.
      duration_s: wall seconds of the search.
      interrupted: True if Ctrl-C ended it.
      out_of_time: True if the budget ended it.
      others_cpus: average number of CPUs that other programs used during the search; None if unknown.
    """

    table: Table
    path: Path
    jobs: tuple[Job, ...]
    duration_s: float
    interrupted: bool = False
    out_of_time: bool = False
    others_cpus: float | None = None

    def measured(self, job: Job) -> list[Measurement]:
        """Returns all measurements of a job."""
        return [found for found in self.table.measurements if found.case.key == job.case.key]


def tune(
    fn: Callable[..., Any],
    *args: Any,
    budget_s: float = 60.0,
    out: Path | str | None = None,
    again: bool = False,
    progress: Progress | None = None,
    trying: Path | None = None,
    threads: int = 1,
) -> TuneReport:
    """Measures the candidates for each op call in `fn(*args)`; later calls use the fastest.

    `fn` is traced, not run. For each distinct op call in it, including calls inside `jit`, `scan`, `vmap`, `grad` and
    `checkpoint`, every supported implementation is tried with every config on random operands: forward, and if the call
    is differentiated, with the gradient with respect to the same arguments. Candidates outside the tolerance of the
    op's contract are rejected, and errors are recorded. The rest are timed in turns, to completion.

    The most expensive calls come first, and within a call its current choice and the reference, so the table is usable
    at any point where the budget or Ctrl-C ends the search. Existing measurements under the same minor version of JAX
    are reused.

    Functions that JAX has already compiled do not change. Later traces use the table, in this process and in processes
    that start in the same working directory; a table under another file name is for `tuned`.

    Args:
      fn: the function to tune.
      args: arguments of `fn`, as arrays or `jax.ShapeDtypeStruct`.
      budget_s: wall seconds, compilations included. Work in flight at the end may finish.
      out: file of the table; by default one file per chip in `.stack/tuned` of the working directory, or in the folder
        that `STACK_TUNED_TABLES` names.
      again: repeat known measurements.
      progress: called for each job.
      trying: file that records the current candidate, in case this process dies.
      threads: number of threads that compile the candidates of several calls before these are timed. A candidate that
        ends the process while it compiles in one of several threads is not recorded in `trying`.

    Raises:
      ArgumentError: `fn` cannot be traced with these arguments.
      TuningError: `fn` calls no op, or the table cannot be read or written.
    """
    started_s = time.perf_counter()
    chip = current_chip()
    name = ChipName.of(chip)
    path = local_table_path(name) if out is None else Path(out)
    table = Table.read(path) if path.exists() else Table(name)
    if table.chip != name:
        raise TuningError(f"{str(path)!r} is a table of {table.chip}, and this is {name}; name another file.")
    search = _Search(table, path, chip, started_s + budget_s, again=again, trying=trying, threads=threads)
    neighbours = Neighbours()
    with use_chip(chip):
        with tracing(fn, args):
            explanation = ops.explain(fn, *args)
        # The budget may end early: calls that decide a choice come first, by decreasing cost.
        jobs = sorted(_jobs(explanation), key=lambda job: (not job.decides, -_weight_s(job, table, chip)))
        if not jobs:
            raise TuningError("The function calls no op of stack_core.ops, so there is nothing to tune.")
        for number, job in enumerate(jobs):
            if progress is not None:
                progress(number, len(jobs), str(job))
            search.compile_ahead(jobs[number:])
            jobs[number] = search.run(job, jobs[number + 1 :])
        if not path.exists():
            search.table.write(path)
        # Its tables may have been loaded before this one was written.
        MEASURED.forget()
        # Only by this table: under another name than the default one, no lookup would find the file.
        with ops.use_tuned_table(OneTable(search.table)):
            chosen = {job.case.key: job for job in _jobs(ops.explain(fn, *args))}
    jobs = [_with_choice(job, chosen[job.case.key]) for job in jobs]
    if progress is not None:
        progress(len(jobs), len(jobs), "done")
    duration_s = time.perf_counter() - started_s
    ended = (search.interrupted, search.out_of_time)
    return TuneReport(search.table, path, tuple(jobs), duration_s, *ended, neighbours.cpus())


def planned_jobs(fn: Callable[..., Any], *args: Any) -> list[tuple[Job, list[str]]]:
    """Lists the jobs of `tune` for the target chip, each with the implementation of every candidate.

    A job that `tune` skips has at most one candidate.
    """
    found = []
    with tracing(fn, args):
        jobs = _jobs(ops.explain(fn, *args))
    for job in jobs:
        names = [candidate.implementation.name for candidate in candidates_of(job.call)]
        found.append((job, names[:1] if job.skipped or _is_without_choice(job.call) else names))
    return found


def _with_choice(job: Job, chosen: Job) -> Job:
    return replace(job, after=chosen.before, reason=chosen.reason)


def _jobs(explanation: Explanation) -> list[Job]:
    """Lists the executed directions of all calls, merging calls that share their measurements."""
    jobs: dict[tuple[Any, ...], Job] = {}
    for explained in explanation:
        for direction in ("forward", "backward") if explained.differentiated else ("forward",):
            call = replace(explained.call, direction=direction)
            names = explained.differentiated if direction == "backward" else ()
            case = Case(shape_of(call), direction, names)
            choice = explained.forward if direction == "forward" else explained.backward
            if isinstance(choice, StackError):
                gets, reason = candidates_of(call)[0], _first_line(choice)
            else:
                gets, reason = Candidate(choice.implementation, choice.config), choice.reason
            job = Job(case, call, explained.calls, (explained.source,), gets, gets, reason, skipped=_untunable(call))
            jobs[case.key] = _together(jobs[case.key], job) if case.key in jobs else job
    return [replace(job, decides=_decides(job, jobs.values())) for job in jobs.values() if job.calls]


def _decides(job: Job, jobs: Iterable[Job]) -> bool:
    if job.case.direction == "backward":
        return True
    gradients = [other for other in jobs if other.case.key[:3] == job.case.key[:3] and other.case.gradients_of]
    calls = (job.call, *(other.call for other in gradients))
    return not gradients or not all(each.is_joint for call in calls for each in candidates_of(call))


def _together(one: Job, other: Job) -> Job:
    sources = tuple(dict.fromkeys(one.sources + other.sources))
    return replace(one, calls=one.calls + other.calls, sources=sources)


def _untunable(call: OpCall) -> str:
    if call.op in _MESH_OPS:
        return "it runs inside shard_map alone"
    empty = [name for name, struct in call.arrays.items() for leaf in jax.tree.leaves(struct) if not leaf.size]
    return f"{empty[0]} is empty" if empty else ""


def _is_without_choice(call: OpCall) -> bool:
    """Checks whether only one candidate supports the call in both directions."""
    return all(len(candidates_of(replace(call, direction=direction))) < 2 for direction in ("forward", "backward"))


def _weight_s(job: Job, table: Table, chip: Chip) -> float:
    """Returns the cost of a job in one call of the function: its measured time, or its time at the chip's peaks."""
    known = [
        found.median_s
        for found in table.measurements
        if found.case.key == job.case.key and found.candidate == job.before.key and found.outcome == "measured"
    ]
    return max(job.calls, 1) * (known[-1] if known else roofline_s(job.case.shape, chip))


class _Search:
    """Measures one job after another and writes the table after each."""

    def __init__(
        self,
        table: Table,
        path: Path,
        chip: Chip,
        end_s: float,
        *,
        again: bool,
        trying: Path | None = None,
        threads: int = 1,
    ) -> None:
        self.table = table
        self._threads = threads
        self._trials: dict[tuple[Any, ...], Trial] = {}
        self._ahead: set[tuple[Any, ...]] = set()
        self.interrupted = False
        self.out_of_time = False
        self._path, self._chip, self._end_s, self._again, self._trying = path, chip, end_s, again, trying
        self._versions = _versions()

    def compile_ahead(self, jobs: Sequence[Job]) -> None:
        """Compiles the first candidates of the next jobs in threads, unless those of the first job were compiled."""
        if self._threads < 2 or not jobs or jobs[0].case.key in self._ahead:
            return
        work: dict[tuple[tuple[Any, ...], Candidate], Callable[[], None]] = {}
        share, total = 0.0, sum(math.sqrt(_weight_s(job, self.table, self._chip)) for job in jobs)
        for job in jobs:
            if len(work) >= _PROGRAMS_A_THREAD * self._threads:
                break
            self._ahead.add(job.case.key)
            share += math.sqrt(_weight_s(job, self.table, self._chip)) / total
            if job.skipped or _is_without_choice(job.call):
                continue
            selected = self._candidates_to_measure(job)[:_CANDIDATES_AHEAD]
            if selected:
                trial = self._trials[job.case.key] = Trial(job.call, job.case.gradients_of)
                work |= {(job.case.key, each): functools.partial(trial.compile, each) for each in selected}
        left_s = self._end_s - time.perf_counter()
        compile_ahead(
            work, threads=self._threads, deadline_s=time.perf_counter() + _TRYING_SHARE * min(2 * share, 1.0) * left_s
        )

    def run(self, job: Job, later: Sequence[Job]) -> Job:
        """Measures a job within its share of the remaining time and returns the updated job."""
        if job.skipped:
            return job
        if _is_without_choice(job.call):
            return replace(job, skipped="nothing else supports it")
        left_s = self._end_s - time.perf_counter()
        # Before the budget is checked, because a job with known measurements takes no time.
        selected = self._candidates_to_measure(job)
        if not selected:
            return replace(job, cached=True)
        self.out_of_time = self.out_of_time or left_s <= 0
        if self.interrupted or self.out_of_time:
            return replace(job, skipped="interrupted" if self.interrupted else "out of time")
        # The square root, because much of the time is compilation, which costs about the same for each job.
        alike = [each for each in (job, *later) if each.decides == job.decides]
        # Jobs that decide no choice come last and get only the time that remains.
        weights = [math.sqrt(_weight_s(each, self.table, self._chip)) for each in alike]
        share_s = max(left_s * weights[0] / sum(weights), min(_MIN_S, left_s))
        found: list[Measurement] = []
        try:
            skipped = self._measure(job, selected, share_s, found)
        except KeyboardInterrupt:
            self.interrupted, skipped = True, "interrupted"
        if self._path.exists():  # another process may have written to it
            self.table = Table.read(self._path).merge(self.table)
        self.table = self.table.merge(found)
        self.table.write(self._path)
        return replace(job, skipped=skipped)

    def _candidates_to_measure(self, job: Job) -> list[Candidate]:
        """Lists the candidates to measure: unknown ones, the current choice, the reference and the fastest known one.

        Candidates that were rejected or that failed before, perhaps crashing the process, are not tried again.
        """
        candidates = candidates_of(job.call)
        known = {found.key: found for found in self.table.measurements}
        records = {candidate: known.get(self._record(job, candidate, outcome="").key) for candidate in candidates}
        missing = [candidate for candidate, record in records.items() if record is None or self._again]
        if not missing:
            return []
        times_s = {each: record.median_s for each, record in records.items() if record and record.median_s}
        # A known time is measured again next to new ones, because times of different runs do not compare.
        best = sorted(times_s, key=lambda candidate: times_s[candidate])[:1]
        promising = sorted(missing, key=lambda candidate: self._expected_s(job, candidate))
        selected = dict.fromkeys([job.before, candidates[0], *best, *promising])
        if self._again:
            return list(selected)
        records = {each: known.get(self._record(job, each, outcome="").key) for each in selected}
        return [each for each, record in records.items() if record is None or record.outcome == "measured"]

    def _expected_s(self, job: Job, candidate: Candidate) -> float:
        """Estimates a candidate's seconds from its measurements at other sizes; infinite without any."""
        kind = (job.case.shape.op, job.case.shape.traits, job.case.direction, candidate.key, "measured")
        samples = [
            (found.case.shape, found.median_s)
            for found in self.table.measurements
            if kind
            == (found.case.shape.op, found.case.shape.traits, found.case.direction, found.candidate, found.outcome)
        ]
        return estimate_s(samples, job.case.shape) if samples else float("inf")

    def _measure(self, job: Job, candidates: Sequence[Candidate], share_s: float, found: list[Measurement]) -> str:
        """Appends measurements to `found`; returns a description of missing ones, or ""."""
        end_s = time.perf_counter() + share_s
        trial = self._trials.pop(job.case.key, None) or Trial(job.call, job.case.gradients_of)
        try:
            trial.prepare()
        except Exception as error:  # Unfit operands or a failing reference: nothing to compare.
            return f"the reference failed: {_first_line(error)}"
        accepted: dict[Candidate, Callable[[], Any]] = {}
        for candidate in candidates:
            # Until two candidates are accepted there is nothing to compare, so the time counts only after that.
            if len(accepted) >= 2 and time.perf_counter() > end_s - (1 - _TRYING_SHARE) * share_s:
                break
            try:
                with self._noted(job, candidate):
                    accepted[candidate] = trial.accept(candidate)
            except WrongNumbers as error:
                found.append(self._record(job, candidate, outcome="rejected", reason=_first_line(error)))
            except Exception as error:  # A failure of any kind is a result to record.
                reason = f"{type(error).__name__}: {_first_line(error)}"
                found.append(self._record(job, candidate, outcome="failed", reason=reason))
        budget_s = max(end_s - time.perf_counter(), (1 - _TRYING_SHARE) * share_s)
        timed = measure(accepted, budget_s=budget_s, compiled=True)
        for candidate, error in timed.errors.items():
            found.append(self._record(job, candidate, outcome="failed", reason=_first_line(error)))
        self.interrupted = timed.interrupted
        if rounds := _undecided(job.before, timed.timings):
            ended = "interrupted" if timed.interrupted else "out of time"
            return f"{ended} after {rounds} rounds, and a change needs {MIN_ROUNDS}: give it a larger budget"
        for candidate, timing in timed.timings.items():
            numbers = {"median_s": timing.median_s, "spread": timing.spread, "cpu_s": timing.median_cpu_s}
            found.append(self._record(job, candidate, outcome="measured", rounds=timing.rounds, **numbers))
        if timed.interrupted:
            return "interrupted"
        missing = len(candidates) - len(found)
        return f"out of time for {missing} of {len(candidates)}" if missing else ""

    @contextlib.contextmanager
    def _noted(self, job: Job, candidate: Candidate) -> Iterator[None]:
        """Records the current candidate in a file, for the process that finds this one dead."""
        if self._trying is None:
            yield
            return
        Table(self.table.chip, (self._record(job, candidate, outcome="failed"),)).write(self._trying)
        try:
            yield
        finally:
            self._trying.unlink()

    def _record(self, job: Job, candidate: Candidate, *, outcome: str, **numbers: Any) -> Measurement:
        return Measurement(
            case=job.case,
            implementation=candidate.implementation.name,
            config=encoded_config(candidate.config),
            outcome=outcome,
            whole=job.case.direction == "backward" and candidate.is_joint,
            versions=self._versions,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **numbers,
        )


def _undecided(before: Candidate, timings: Mapping[Candidate, Timing]) -> int:
    """Returns the rounds of the fastest candidate if they are too few to replace the current choice; 0 otherwise."""
    if before not in timings:
        return 0
    best = min(timings, key=lambda candidate: timings[candidate].median_s)
    rounds = timings[best].rounds
    return rounds if best != before and rounds < MIN_ROUNDS else 0


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
