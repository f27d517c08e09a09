"""Measures every implementation at the standard calls. `python -m stack_kernels.burn_in.speeds SETTINGS`.

SETTINGS is a JSON object: `out`, `seconds`, `ops`, `threads` and `skip`, tasks not to try. Core's choices at all calls
come first, then the implementations by name. Each of the two waves is compiled in threads and then timed. The results
are written after each call. Prints JSON objects: {"started": task} and {"finished": task} around all work on a task,
{"failed": task, "reason": ...}, {"refused": task, "reason": ...}, and {"not_reached": task}.
"""

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from stack_core import ops
from stack_core.abi.errors import BenchmarkError, UnsupportedOp
from stack_kernels.bench.cases import make_arrays, shapes_of
from stack_kernels.bench.results import Results, Row
from stack_kernels.bench.run import Task, explained, ran, results, tasks, timed
from stack_kernels.burn_in.checks import choice_order, platform_of
from stack_kernels.burn_in.children import leave_with_parent
from stack_kernels.burn_in.standard import DTYPE, standard_cases
from stack_kernels.tuning.ahead import compile_ahead

__all__ = ["main", "measure_waves", "waves"]

_ROUNDS = 15
_FIRST_WAVE_SHARE = 0.6
_COMPILING_SHARE = 0.65


@dataclass(frozen=True)
class _Prepared:
    """Programs of a task, compiled.

    Attributes:
      task: the task.
      explanation: its chosen implementations.
      ran: their names and configs.
      reference: the program with core's reference.
      own: the measured program.
    """

    task: Task
    explanation: ops.ExplainedCall
    ran: str
    reference: Callable[[Mapping[str, Any]], Any]
    own: Callable[[Mapping[str, Any]], Any]


def waves(chosen_ops: Sequence[str], platform: str) -> list[list[Task]]:
    """Lists the calls in two waves: all calls with core's choice, then all with each implementation by name."""
    cases = [case for case in standard_cases() if case.op in chosen_ops]
    named = [
        task
        for case in cases
        for task in tasks([case], [DTYPE], [name for name in choice_order(case.op, platform) if name != "reference"])
    ]
    return [tasks(cases, [DTYPE], [""]), named]


class _Programs:
    """Compiles each program once, from any thread. Tasks whose choices are equal share a program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._programs: dict[tuple[str, ...], Any] = {}

    def prepare(self, task: Task) -> _Prepared | str:
        """Returns the compiled programs of a task, or the reason if the implementation does not support the call."""
        found = explained(task, shapes_of(task.case, task.dtype))
        if isinstance(found, UnsupportedOp):
            return " ".join(str(found).split())
        name = ran(task, found)
        own = self._compiled(task, name)
        return _Prepared(task, found, name, self._compiled(replace(task, asked="reference"), "reference"), own)

    def _compiled(self, task: Task, name: str) -> Any:
        key = (task.case.op, task.case.name, task.direction, name)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._programs:
                program = jax.jit(task.call(task.asked or None))
                try:
                    self._programs[key] = program.lower(shapes_of(task.case, task.dtype)).compile()
                except Exception as error:
                    raise BenchmarkError(f"{name} failed with {type(error).__name__}: {error}") from error
            return self._programs[key]


class _Arrays:
    """Arrays of the last case: the calls of a case follow each other, and two cases may not fit into the memory."""

    def __init__(self) -> None:
        self._key: tuple[str, ...] = ()
        self._arrays: Mapping[str, Any] = {}

    def of(self, task: Task) -> Mapping[str, Any]:
        key = (task.case.op, task.case.name, task.dtype)
        if key != self._key:
            self._arrays = {}  # frees the memory for the next case
            self._key, self._arrays = key, make_arrays(task.case, task.dtype)
        return self._arrays


def measure_waves(
    planned: Sequence[Sequence[Task]],
    rows: list[Row],
    *,
    end_s: float,
    threads: int,
    say: Callable[[Mapping[str, Any]], None],
    write: Callable[[Sequence[Row]], None],
) -> None:
    """Compiles and times the waves until `end_s` of `time.perf_counter`; appends to `rows` and writes after each call.

    Calls whose choices were already measured get a copy of that row.
    """
    programs, arrays = _Programs(), _Arrays()
    measured = {(row.op, row.case, row.direction, row.ran): row for row in rows}
    for place, wave in enumerate(planned):
        left_s = end_s - time.perf_counter()
        wave_end_s = end_s - (0.0 if place == len(planned) - 1 else (1 - _FIRST_WAVE_SHARE) * left_s)
        prepared = compile_ahead(
            {str(task): functools.partial(_noted, programs, task, say) for task in wave},
            threads=threads,
            deadline_s=time.perf_counter() + _COMPILING_SHARE * (wave_end_s - time.perf_counter()),
            end_s=wave_end_s,
        )
        for number, task in enumerate(wave):
            found, remaining_s = prepared.get(str(task)), wave_end_s - time.perf_counter()
            if isinstance(found, Exception):
                say({"failed": str(task), "reason": _one_line(found)})
            elif isinstance(found, str):
                say({"refused": str(task), "reason": found})
            elif found is None or remaining_s <= 0:
                say({"not_reached": str(task)})
            else:
                row = measured.get((task.case.op, task.case.name, task.direction, found.ran))
                if row is None:
                    row = _timed(found, arrays, remaining_s / (len(wave) - number), say)
                if row is not None:
                    measured[row.op, row.case, row.direction, row.ran] = row
                    rows.append(replace(row, asked=task.asked))
                    write(rows)


def _noted(programs: _Programs, task: Task, say: Callable[[Mapping[str, Any]], None]) -> _Prepared | str:
    say({"started": str(task)})
    try:
        return programs.prepare(task)
    finally:
        say({"finished": str(task)})


def _timed(found: _Prepared, arrays: _Arrays, budget_s: float, say: Callable[[Mapping[str, Any]], None]) -> Row | None:
    task = found.task
    say({"started": str(task)})
    try:
        row = timed(
            task,
            found.explanation,
            arrays.of(task),
            found.reference,
            found.own,
            rounds=_ROUNDS,
            budget_s=budget_s,
            compiled=True,
        )
    except Exception as error:  # any failure of a kernel on a new chip is a finding
        say({"failed": str(task), "reason": _one_line(error)})
        return None
    finally:
        say({"finished": str(task)})
    if isinstance(row, str):
        say({"not_reached": str(task)})
        return None
    return row


def _one_line(error: Exception) -> str:
    reason = str(error) if isinstance(error, BenchmarkError) else f"{type(error).__name__}: {error}"
    return " ".join(reason.split())[:300]


def main() -> None:
    """Measures as the settings on the command line say."""
    settings = json.loads(sys.argv[1])
    end_s = time.perf_counter() + settings["seconds"]
    leave_with_parent()
    lock = threading.Lock()

    def say(message: Mapping[str, Any]) -> None:
        with lock:
            print(json.dumps(message), flush=True)

    out = Path(settings["out"])
    rows = list(Results.read(out).rows) if out.exists() else []
    done = {row.key for row in rows}
    platform = platform_of(jax.default_backend())
    planned = [
        [task for task in wave if task.key not in done and str(task) not in settings["skip"]]
        for wave in waves(settings["ops"], platform)
    ]
    measure_waves(
        planned, rows, end_s=end_s, threads=settings["threads"], say=say, write=lambda rows: results(rows).write(out)
    )
    sys.stdout.flush()
    # Compilations that were not waited for would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
