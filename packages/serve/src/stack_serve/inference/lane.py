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

__all__ = ["Lane", "LaneRequest", "LaneResult", "Statistics"]

_LOG = logging.getLogger(__name__)
_MEASURED = 5


@dataclass(frozen=True)
class LaneResult:
    """Outputs in the signature's order, how long the request waited, and how long its calls took."""

    outputs: list[np.ndarray]
    queue_s: float
    compute_s: float


Outcome = LaneResult | Exception


@dataclass(eq=False)
class LaneRequest:
    """A checked request on its way through a lane.

    Attributes:
      inputs: in the signature's order, padded but for rows.
      sizes: of named axes, before padding.
      group: of requests that may share calls: signature, and sizes of all axes but the batch.
      rows: that no call has taken yet.
    """

    group: Hashable
    inputs: Sequence[np.ndarray]
    sizes: Mapping[str, int]
    rows: int
    deadline_s: float | None
    report: Callable[["LaneRequest", Outcome], None]
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
    """Computes the requests of one opened bundle, joined into the calls that cost least.

    A batch belongs to one lane, so versions never mix.

    Args:
      max_waiting: rows that may wait; more are refused.
      report: gets the outcomes of a call together, on the lane's thread.
    """

    def __init__(
        self, bundle: Bundle, *, max_waiting: int, report: Callable[[list[tuple[LaneRequest, Outcome]]], None]
    ) -> None:
        self.manifest = bundle.manifest
        self.statistics = Statistics()
        self._bundle = bundle
        self._max_waiting = max_waiting
        self._report = report
        self._programs: dict[tuple[_Group, int], Callable[..., Any]] = {}
        self._costs: dict[Hashable, Costs] = {}
        self._waiting: deque[LaneRequest] = deque()
        self._planned: list[LaneRequest] = []
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
        """Takes requests from now on."""
        self._thread.start()

    def request(
        self,
        name: str,
        inputs: Mapping[str, np.ndarray],
        deadline_s: float | None,
        report: Callable[[LaneRequest, Outcome], None],
    ) -> LaneRequest:
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
        return LaneRequest(_group(name, signature, padded), arrays, sizes, rows, deadline_s, report, time.monotonic())

    def submit(self, request: LaneRequest) -> None:
        """Queues a request; its result is reported later.

        Raises:
          EngineBusy: too many rows wait.
          EngineStopped: the lane is being drained, or its thread failed.
        """
        with self._changed:
            if self._failure is not None:
                raise EngineStopped(f"This version of {self.manifest.name!r} failed: {self._failure!r}. Load it again.")
            if not self._open:
                raise EngineStopped(f"This version of {self.manifest.name!r} is being unloaded. Ask again.")
            if self._rows and self._rows + request.rows > self._max_waiting:
                raise EngineBusy(
                    f"{self._rows} rows wait for {self.manifest.name!r}; {self._max_waiting} may. Ask again later.",
                    retry_after_s=self._wait_s(),
                )
            self._waiting.append(request)
            self._rows += request.rows
            self._changed.notify()

    @property
    def waiting_rows(self) -> int:
        """Rows that no call has taken yet."""
        return self._rows

    def drain(self) -> None:
        """Rejects new requests and returns once the queued requests are finished."""
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
            # `_fail` must find requests that left the queue and were not answered yet.
            requests = self._planned = list(self._waiting)
            now_s = time.monotonic()
            costs = {group: costs.at(now_s) for group, costs in self._costs.items()}
            planned = plan(requests, costs, now_s)
            outcomes: list[tuple[LaneRequest, Outcome]] = [
                (requests[number], _late(requests[number])) for number in planned.expired
            ]
            parts = self._take(requests, planned.call, now_s)
            # A request with more rows than the call stays in the queue.
            gone = {id(request) for request, _ in outcomes} | {
                id(request) for request, _, rows in parts if request.rows == 0
            }
            self._waiting = deque(request for request in requests if id(request) not in gone)
            self._rows = sum(request.rows for request in self._waiting)
        if planned.call is not None:
            outcomes += self._compute(planned.call, parts)
        self._count(outcomes)
        self._report(outcomes)
        self._planned = []
        return True

    def _fail(self, error: Exception) -> None:
        """Rejects new requests and fails all queued requests with the error."""
        with self._changed:
            self._open, self._failure = False, error
            # A request with some rows in the call and some in the queue is in both lists.
            requests = list(dict.fromkeys((*self._planned, *self._waiting)))
            self._waiting.clear()
            self._planned = []
            self._rows = 0
        outcomes: list[tuple[LaneRequest, Outcome]] = [(request, error) for request in requests]
        self._count(outcomes)
        self._report(outcomes)

    def _take(
        self, requests: Sequence[LaneRequest], call: Call | None, now_s: float
    ) -> list[tuple[LaneRequest, int, int]]:
        """Marks rows as taken; returns each request with its first row and how many."""
        parts: list[tuple[LaneRequest, int, int]] = []
        for number, rows in call.takes if call is not None else ():
            request = requests[number]
            parts.append((request, request.taken, rows))
            request.taken += rows
            request.rows -= rows
            if request.began_s is None:
                request.began_s = now_s
        return parts

    def _compute(self, call: Call, parts: Sequence[tuple[LaneRequest, int, int]]) -> list[tuple[LaneRequest, Outcome]]:
        assert isinstance(call.group, _Group)
        signature = self.manifest.signatures[call.group.signature]
        began_s = time.monotonic()
        try:
            arrays = _joined(signature, call.size, parts)
            outputs = [np.asarray(result) for result in self._programs[call.group, call.size](*arrays)]
        except Exception as error:  # Whatever the device says, these requests end with it and the next ones are tried.
            self._forget({id(request) for request, _, _ in parts})
            return [(request, error) for request, _, _ in parts]
        took_s = time.monotonic() - began_s
        self._note(call, took_s)
        outcomes: list[tuple[LaneRequest, Outcome]] = []
        place = 0
        for request, _, rows in parts:
            request.parts.append([output[place : place + rows] for output in outputs] if signature.joins else outputs)
            place += rows
            request.compute_s += took_s
            if request.rows == 0:
                outcomes.append((request, _result(signature, request)))
        return outcomes

    def _forget(self, failed: set[int]) -> None:
        """Drops what else waits of requests that failed."""
        with self._changed:
            self._waiting = deque(request for request in self._waiting if id(request) not in failed)
            self._rows = sum(request.rows for request in self._waiting)

    def _note(self, call: Call, took_s: float) -> None:
        """Counts a call."""
        count, seconds = self.statistics.calls.get(call.size, (0, 0.0))
        self.statistics.calls[call.size] = (count + 1, seconds + took_s)
        self._costs[call.group].note(call.size, took_s, time.monotonic())

    def _count(self, outcomes: Sequence[tuple[LaneRequest, Outcome]]) -> None:
        statistics = self.statistics
        for request, outcome in outcomes:
            if isinstance(outcome, LaneResult):
                statistics.requests += 1
                statistics.rows += request.taken
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


def _joined(signature: Signature, size: int, parts: Sequence[tuple[LaneRequest, int, int]]) -> list[np.ndarray]:
    """Concatenates the rows of the requests of a call and pads them with zeros."""
    request, first, rows = parts[0]
    # Rows of one request that fill the program need no copy.
    if not signature.joins or (len(parts) == 1 and rows == size):
        return [array[first : first + rows] if signature.joins else array for array in request.inputs]
    joined: list[np.ndarray] = []
    for number, array in enumerate(request.inputs):
        result = np.empty((size, *array.shape[1:]), array.dtype)
        place = 0
        for each, begin, count in parts:
            result[place : place + count] = each.inputs[number][begin : begin + count]
            place += count
        result[place:] = 0
        joined.append(result)
    return joined


def _result(signature: Signature, request: LaneRequest) -> LaneResult:
    parts = request.parts
    outputs = list(parts[0]) if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]
    assert request.began_s is not None
    return LaneResult(
        calls.cropped(signature.outputs, outputs, request.sizes), request.began_s - request.arrived_s, request.compute_s
    )


def _late(request: LaneRequest) -> DeadlineExceeded:
    waited_s = time.monotonic() - request.arrived_s
    return DeadlineExceeded(f"The deadline passed after {waited_s:.3f} s in the queue. Allow more time, or ask less.")
