"""Worker processes that run checks; a crash or a hang costs the check that caused it and a restart.

Tracing and lowering hold Python's lock for 0.2 s of a check, a third of its time on a CPU: threads would keep three
cores busy. Processes keep all cores busy, and a broken CUDA context ends only one process. Several processes may use a
GPU at the same time, and checks are not timed. A TPU belongs to one process, whose threads then share the work.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stack_core.abi.errors import BenchmarkError
from stack_kernels.burn_in.checks import Check, CheckResult, Pool
from stack_kernels.burn_in.children import kill_group, last_errors, parse_message, problem_of, start_child

__all__ = ["WorkerPool"]

_MAX_RESTARTS = 100


@dataclass
class _Worker:
    """A worker process.

    Attributes:
      log: file of its standard error.
      capacity: number of checks that it runs at the same time.
      is_ready: whether it has imported JAX and opened the device.
      in_flight: its running checks with their start times, by key.
      is_overdue: whether it was killed because a check took too long.
    """

    process: Any
    log: Path
    capacity: int
    is_ready: bool = False
    in_flight: dict[str, tuple[Check, float]] = field(default_factory=dict)
    is_overdue: bool = False


class WorkerPool(Pool):
    """Checks in worker processes; a context manager that ends with all workers killed.

    Args:
      arguments: arguments of the interpreter that start a worker; the number of threads is appended.
      workers: number of processes.
      threads: number of checks that run in each process at the same time.
      limit_s: duration after which a check counts as hanging.
      logs: folder for the standard error of the workers.
      environment: extra environment variables of the workers.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        workers: int,
        threads: int = 1,
        limit_s: float,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments, self._limit_s, self._logs, self._environment = arguments, limit_s, logs, environment
        self._clock = clock
        self._messages: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self._workers: list[_Worker] = []
        self._started = 0
        self._again: list[Check] = []
        self._problem = ""
        for _ in range(workers):
            self._start(threads)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            kill_group(worker.process)
            self._reap(worker)

    @property
    def free(self) -> int:
        return sum(each.capacity - len(each.in_flight) for each in self._workers if each.is_ready) - len(self._again)

    def submit(self, check: Check) -> None:
        worker = min((each for each in self._workers if each.is_ready), key=lambda each: len(each.in_flight))
        worker.in_flight[check.key] = check, self._clock()
        request = {"op": check.op, "implementation": check.implementation, "check": check.name, "key": check.key}
        # A broken pipe belongs to a worker that has died, whose end is the next message.
        with contextlib.suppress(OSError):
            worker.process.stdin.write(json.dumps(request).encode() + b"\n")
            worker.process.stdin.flush()

    def wait(self, timeout_s: float) -> list[CheckResult]:
        if not self._workers:
            raise BenchmarkError(f"No worker process can use the device. {self._problem}")
        end_s = self._clock() + timeout_s
        started_s = [start_s for worker in self._workers for _, start_s in worker.in_flight.values()]
        next_s = min([end_s, *(start_s + self._limit_s for start_s in started_s)])
        try:
            worker, message = self._messages.get(timeout=max(next_s - self._clock(), 0.0))
        except queue.Empty:
            self._kill_overdue()
            return []
        outcomes = self._handle_exit(worker) if message is None else self._answered(worker, message)
        while self._again and any(each.is_ready and len(each.in_flight) < each.capacity for each in self._workers):
            self.submit(self._again.pop())
        return outcomes

    def _answered(self, worker: _Worker, message: Mapping[str, Any]) -> list[CheckResult]:
        if message.get("ready"):
            worker.is_ready = True
            return []
        found = worker.in_flight.pop(str(message.get("key")), None)
        if found is None:
            return []
        return [CheckResult(found[0], message["outcome"], message["reason"], message["seconds"])]

    def _handle_exit(self, worker: _Worker) -> list[CheckResult]:
        """Blames the worker's check, or runs the checks again one by one if there are several."""
        status = self._reap(worker)
        self._workers.remove(worker)
        problem = problem_of(status, last_errors(worker.log)) or "the process ended"
        if not worker.is_ready:
            self._problem = problem  # A worker that cannot start would not start a second time either.
            return []
        checks = list(worker.in_flight.values())
        # Several checks in flight hide which one ended the process, so the next process runs one at a time.
        if self._started < _MAX_RESTARTS:
            self._start(1 if len(checks) > 1 else worker.capacity)
        self._problem = problem
        if len(checks) == 1:
            check, started_s = checks[0]
            seconds = self._clock() - started_s
            reason = f"no result after {self._limit_s:.0f} s" if worker.is_overdue else problem
            return [CheckResult(check, "died", reason, seconds)]
        self._again += [check for check, _ in checks]
        return []

    def _kill_overdue(self) -> None:
        for worker in self._workers:
            if any(self._clock() - started_s >= self._limit_s for _, started_s in worker.in_flight.values()):
                worker.is_overdue = True
                kill_group(worker.process)

    def _start(self, threads: int) -> None:
        log = self._logs / f"contracts-{self._started}.log"
        process = start_child([*self._arguments, str(threads)], log=log, environment=self._environment)
        self._started += 1
        worker = _Worker(process, log, threads)
        self._workers.append(worker)
        threading.Thread(target=self._read, args=(worker, process.stdout), daemon=True).start()

    def _read(self, worker: _Worker, output: IO[bytes]) -> None:
        for line in output:
            message = parse_message(line)
            if message is not None:
                self._messages.put((worker, message))
        self._messages.put((worker, None))

    def _reap(self, worker: _Worker) -> int:
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
        status = worker.process.wait()
        worker.process.stdout.close()
        return status
