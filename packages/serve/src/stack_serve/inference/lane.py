"""One version of a model at work: a queue, a thread, and the programs of an opened bundle."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from stack_core.abi.errors import DeadlineExceeded, EngineBusy, EngineStopped
from stack_serve.bundle import calls
from stack_serve.bundle.manifest import BATCH, Signature
from stack_serve.bundle.opened import Bundle
from stack_serve.inference.batching import Call, plan
from stack_serve.inference.costs import Costs

__all__ = ["Answer", "Job", "Lane", "Statistics"]

_LOG = logging.getLogger(__name__)
_MEASURED = 5


@dataclass(frozen=True)
class Answer:
    """Outputs in the signature's order, how long the request waited, and how long its calls took."""

    outputs: list[np.ndarray]
    queue_s: float
    compute_s: float


Outcome = Answer | Exception


@dataclass(eq=False)
class Job:
    """A checked request on its way through a lane.

    Attributes:
      inputs: in the signature's order, padded but for rows.
      sizes: of named axes, before padding.
      group: of jobs that may share calls: signature, and sizes of all axes but the batch.
      rows: that no call has taken yet.
    """

    group: Hashable
    inputs: Sequence[np.ndarray]
    sizes: Mapping[str, int]
    rows: int
    deadline_s: float | None
    report: Callable[["Job", Outcome], None]
    arrived_s: float = 0.0
    began_s: float | None = None
    compute_s: float = 0.0
    taken: int = 0
    parts: list[Sequence[np.ndarray]] = field(default_factory=list)


@dataclass
class Statistics:
    """Statistics of a lane since its start; times are sums in seconds.

    Attributes:
      calls: (number of calls, seconds) by program size.
    """

    requests: int = 0
    failed: int = 0
    rows: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    calls: dict[int, tuple[int, float]] = field(default_factory=dict)
    last_s: float = 0.0


@dataclass(frozen=True)
class _Group:
    """Calls that may be joined.

    Attributes:
      sizes: of all named axes but the batch, as pairs in the order of their names.
    """

    signature: str
    sizes: tuple[tuple[str, int], ...]


class Lane:
    """Computes the jobs of one opened bundle, joined into the calls that cost least.

    A batch belongs to one lane, so versions never mix.

    Args:
      max_waiting: rows that may wait; more are refused.
      report: gets the outcomes of a call together, on the lane's thread.
    """

    def __init__(
        self, bundle: Bundle, *, max_waiting: int, report: Callable[[list[tuple[Job, Outcome]]], None]
    ) -> None:
        self.manifest = bundle.manifest
        self.statistics = Statistics()
        self._bundle = bundle
        self._max_waiting = max_waiting
        self._report = report
        self._programs: dict[tuple[_Group, int], Callable[..., Any]] = {}
        self._costs: dict[Hashable, Costs] = {}
        self._waiting: deque[Job] = deque()
        self._planned: list[Job] = []
        self._rows = 0
        self._changed = threading.Condition()
        self._open = True
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane {bundle.manifest.name}", daemon=True)

    def warm_up(self) -> None:
        """Compiles every program and measures its cost; runs on the caller's thread, before `start`."""
        inputs: dict[tuple[_Group, int], list[np.ndarray]] = {}
        for name, signature in self.manifest.signatures.items():
            for sizes in signature.all_sizes():
                key = _group(name, signature, sizes), sizes[BATCH] if signature.joins else 1
                self._programs[key] = self._bundle.program(name, sizes)
                inputs[key] = [np.zeros(spec.at(sizes), jax.numpy.dtype(spec.dtype)) for spec in signature.inputs]
        measured: dict[_Group, dict[int, list[float]]] = {}
        for _ in range(_MEASURED):  # interleaved: a disturbance affects all sizes equally
            for (group, size), arrays in inputs.items():
                seconds = _seconds(self._programs[group, size], arrays)
                measured.setdefault(group, {}).setdefault(size, []).append(seconds)
        self._costs = {group: Costs(of_group) for group, of_group in measured.items()}

    def start(self) -> None:
        """Takes jobs from now on."""
        self._thread.start()

    def job(
        self,
        name: str,
        inputs: Mapping[str, np.ndarray],
        deadline_s: float | None,
        report: Callable[[Job, Outcome], None],
    ) -> Job:
        """Checks a request.

        Raises:
          InferenceError: the inputs do not match the signature; lists its inputs.
        """
        signature = self.manifest.signatures[name]
        sizes = calls.check(signature, inputs)
        others = {axis: calls.size_for(signature, axis, size) for axis, size in sizes.items() if axis != BATCH}
        rows = sizes[BATCH] if signature.joins else 1
        padded = {**sizes, **others}
        arrays = calls.fitted(signature, inputs, padded)
        return Job(_group(name, signature, padded), arrays, sizes, rows, deadline_s, report, time.monotonic())

    def submit(self, job: Job) -> None:
        """Queues a job; its result is reported later.

        Raises:
          EngineBusy: too many rows wait.
          EngineStopped: the lane is being drained, or its thread failed.
        """
        with self._changed:
            if self._failure is not None:
                raise EngineStopped(f"This version of {self.manifest.name!r} failed: {self._failure!r}. Load it again.")
            if not self._open:
                raise EngineStopped(f"This version of {self.manifest.name!r} is being unloaded. Ask again.")
            if self._rows and self._rows + job.rows > self._max_waiting:
                raise EngineBusy(
                    f"{self._rows} rows wait for {self.manifest.name!r}; {self._max_waiting} may. Ask again later.",
                    retry_after_s=self._wait_s(),
                )
            self._waiting.append(job)
            self._rows += job.rows
            self._changed.notify()

    @property
    def waiting_rows(self) -> int:
        """Rows that no call has taken yet."""
        return self._rows

    def drain(self) -> None:
        """Rejects new jobs and returns once the queued jobs are finished."""
        with self._changed:
            self._open = False
            self._changed.notify()
        # The thread may have failed, or was never started.
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # Nobody may wait for a thread that has ended.
            _LOG.exception("The lane of %s failed", self.manifest.name)
            self._fail(error)

    def _step(self) -> bool:
        """Runs one call and reports its outcomes; returns False once the lane is drained."""
        with self._changed:
            while self._open and not self._waiting:
                self._changed.wait()
            if not self._waiting:
                return False
            # `_fail` must find jobs that left the queue and were not answered yet.
            jobs = self._planned = list(self._waiting)
            now_s = time.monotonic()
            costs = {group: costs.at(now_s) for group, costs in self._costs.items()}
            planned = plan(jobs, costs, now_s)
            outcomes: list[tuple[Job, Outcome]] = [(jobs[number], _late(jobs[number])) for number in planned.expired]
            taken = self._take(jobs, planned.call, now_s)
            # A job with more rows than the call stays in the queue.
            gone = {id(job) for job, _ in outcomes} | {id(job) for job, _, rows in taken if job.rows == 0}
            self._waiting = deque(job for job in jobs if id(job) not in gone)
            self._rows = sum(job.rows for job in self._waiting)
        if planned.call is not None:
            outcomes += self._compute(planned.call, taken)
        self._count(outcomes)
        self._report(outcomes)
        self._planned = []
        return True

    def _fail(self, error: Exception) -> None:
        """Rejects new jobs and fails all queued jobs with the error."""
        with self._changed:
            self._open, self._failure = False, error
            # A job with some rows in the call and some in the queue is in both lists.
            jobs = list(dict.fromkeys((*self._planned, *self._waiting)))
            self._waiting.clear()
            self._planned = []
            self._rows = 0
        outcomes: list[tuple[Job, Outcome]] = [(job, error) for job in jobs]
        self._count(outcomes)
        self._report(outcomes)

    def _take(self, jobs: Sequence[Job], call: Call | None, now_s: float) -> list[tuple[Job, int, int]]:
        """Marks rows as taken; returns each job with its first row and how many."""
        taken: list[tuple[Job, int, int]] = []
        for number, rows in call.takes if call is not None else ():
            job = jobs[number]
            taken.append((job, job.taken, rows))
            job.taken += rows
            job.rows -= rows
            if job.began_s is None:
                job.began_s = now_s
        return taken

    def _compute(self, call: Call, taken: Sequence[tuple[Job, int, int]]) -> list[tuple[Job, Outcome]]:
        assert isinstance(call.group, _Group)
        signature = self.manifest.signatures[call.group.signature]
        began_s = time.monotonic()
        try:
            arrays = _joined(signature, call.size, taken)
            outputs = [np.asarray(result) for result in self._programs[call.group, call.size](*arrays)]
        except Exception as error:  # Whatever the device says, these requests end with it and the next ones are tried.
            self._forget({id(job) for job, _, _ in taken})
            return [(job, error) for job, _, _ in taken]
        took_s = time.monotonic() - began_s
        self._note(call, took_s)
        outcomes: list[tuple[Job, Outcome]] = []
        place = 0
        for job, _, rows in taken:
            job.parts.append([output[place : place + rows] for output in outputs] if signature.joins else outputs)
            place += rows
            job.compute_s += took_s
            if job.rows == 0:
                outcomes.append((job, _answer(signature, job)))
        return outcomes

    def _forget(self, failed: set[int]) -> None:
        """Drops what else waits of jobs that failed."""
        with self._changed:
            self._waiting = deque(job for job in self._waiting if id(job) not in failed)
            self._rows = sum(job.rows for job in self._waiting)

    def _note(self, call: Call, took_s: float) -> None:
        """Counts a call."""
        count, seconds = self.statistics.calls.get(call.size, (0, 0.0))
        self.statistics.calls[call.size] = (count + 1, seconds + took_s)
        self._costs[call.group].note(call.size, took_s, time.monotonic())

    def _count(self, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        statistics = self.statistics
        for job, outcome in outcomes:
            if isinstance(outcome, Answer):
                statistics.requests += 1
                statistics.rows += job.taken
                statistics.queue_s += outcome.queue_s
                statistics.compute_s += outcome.compute_s
            else:
                statistics.failed += 1
        statistics.last_s = time.time()

    def _wait_s(self) -> float:
        """Estimates the seconds until the queued rows are computed."""
        now_s = time.monotonic()
        by_row = [min(cost / size for size, cost in costs.at(now_s).items()) for costs in self._costs.values()]
        return self._rows * max(by_row, default=0.0)


def _group(name: str, signature: Signature, sizes: Mapping[str, int]) -> _Group:
    joins = signature.joins
    return _Group(name, tuple(sorted((axis, size) for axis, size in sizes.items() if not (joins and axis == BATCH))))


def _seconds(program: Callable[..., Any], arrays: Sequence[np.ndarray]) -> float:
    began_s = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return time.perf_counter() - began_s


def _joined(signature: Signature, size: int, taken: Sequence[tuple[Job, int, int]]) -> list[np.ndarray]:
    """Concatenates the rows of the jobs of a call and pads them with zeros."""
    job, first, rows = taken[0]
    # Rows of one job that fill the program need no copy.
    if not signature.joins or (len(taken) == 1 and rows == size):
        return [array[first : first + rows] if signature.joins else array for array in job.inputs]
    joined: list[np.ndarray] = []
    for number, array in enumerate(job.inputs):
        result = np.empty((size, *array.shape[1:]), array.dtype)
        place = 0
        for each, begin, count in taken:
            result[place : place + count] = each.inputs[number][begin : begin + count]
            place += count
        result[place:] = 0
        joined.append(result)
    return joined


def _answer(signature: Signature, job: Job) -> Answer:
    outputs = list(job.parts[0]) if len(job.parts) == 1 else [np.concatenate(parts) for parts in zip(*job.parts)]  # noqa: B905
    assert job.began_s is not None
    return Answer(calls.cropped(signature.outputs, outputs, job.sizes), job.began_s - job.arrived_s, job.compute_s)


def _late(job: Job) -> DeadlineExceeded:
    waited_s = time.monotonic() - job.arrived_s
    return DeadlineExceeded(f"The deadline passed after {waited_s:.3f} s in the queue. Allow more time, or ask less.")
