"""Times cases in turns with core's reference, to which all comparisons are relative."""

import dataclasses
import datetime
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import BenchmarkError, StackError, UnsupportedOp
from stack_core.chips import current_chip
from stack_kernels.bench.cases import BenchCase, make_arrays
from stack_kernels.bench.results import Results, Row
from stack_kernels.roofline import Work, work_of
from stack_kernels.tuning.measure import Timing, measure

__all__ = ["Task", "explained", "measured", "ran", "results", "tasks", "timed"]

_VERSIONS = ("jax", "jaxlib", "stack-core", "stack-kernels")


@dataclass(frozen=True)
class Task:
    """One pass of one case in one dtype.

    Attributes:
      case: the case.
      dtype: dtype of its floating arrays.
      direction: "forward", or "gradient" for the value and all gradients.
      asked: implementation to request, or "" to let core choose.
    """

    case: BenchCase
    dtype: str
    direction: str
    asked: str

    @property
    def key(self) -> tuple[str, ...]:
        """Key of the task's row."""
        return (self.case.op, self.case.model, self.case.name, self.dtype, self.direction, self.asked)

    def __str__(self) -> str:
        return " ".join(self.key).strip()

    def call(self, implementation: str | None) -> Callable[[Mapping[str, Any]], Any]:
        """Returns a function of the case's arrays."""
        op = functools.partial(getattr(ops, self.case.op), implementation=implementation)

        def direct(arrays: Mapping[str, Any]) -> Any:
            return op(**arrays, **self.case.options)

        axis = self.case.options.get("axis_name")
        forward = direct if axis is None else _on_one_device(direct, axis)

        def gradient(arrays: Mapping[str, Any]) -> Any:
            floating = {name: x for name, x in arrays.items() if _is_floating(x)}
            output, vjp = jax.vjp(lambda floating: forward({**arrays, **floating}), floating)
            # Ones are cheap at every use; a costly cotangent would favour implementations that read it less often.
            return output, vjp(jax.tree.map(jnp.ones_like, output))

        return gradient if self.direction == "gradient" else forward


def tasks(cases: Sequence[BenchCase], dtypes: Sequence[str], implementations: Sequence[str]) -> list[Task]:
    """Lists all passes of the cases, in their order."""
    return [
        Task(case, dtype, direction, name)
        for case, dtype, name in itertools.product(cases, dtypes, implementations)
        for direction in (("forward", "gradient") if case.gradient else ("forward",))
    ]


def measured(task: Task, *, rounds: int, budget_s: float) -> Row | str:
    """Measures a task in turns with the reference; returns the reason if the requested implementation does not run.

    Raises:
      BenchmarkError: the measured call or the reference failed.
      KeyboardInterrupt: the user stopped the measurement.
    """
    arrays = make_arrays(task.case, task.dtype)
    found = explained(task, arrays)
    if isinstance(found, UnsupportedOp):
        return " ".join(str(found).split())
    reference, program = jax.jit(task.call("reference")), jax.jit(task.call(task.asked or None))
    return timed(task, found, arrays, reference, program, rounds=rounds, budget_s=budget_s)


def timed(
    task: Task,
    explanation: ops.ExplainedCall,
    arrays: Mapping[str, Any],
    reference: Callable[[Mapping[str, Any]], Any],
    program: Callable[[Mapping[str, Any]], Any],
    *,
    rounds: int,
    budget_s: float,
    compiled: bool = False,
) -> Row | str:
    """Times the programs of a task in turns; if both are the same program, it runs once.

    Args:
      task: the task.
      explanation: result of `explained`.
      arrays: the case's arrays.
      reference: the program with core's reference.
      program: the program with the requested implementation.
      rounds: maximum number of rounds.
      budget_s: wall seconds after the first round.
      compiled: whether both programs are compiled.

    Returns:
      The row, or the reason if there is none.

    Raises:
      BenchmarkError: a program failed.
      KeyboardInterrupt: the user stopped the measurement.
    """
    calls = {"reference": reference, **({} if program is reference else {"own": program})}
    found = measure(
        {name: functools.partial(call, arrays) for name, call in calls.items()},
        rounds=rounds,
        budget_s=budget_s,
        # Rows hold the times of both round by round, so both have all rounds.
        stop_early=False,
        compiled=compiled,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    for name, error in found.errors.items():
        subject = "the reference" if name == "reference" else ran(task, explanation)
        raise BenchmarkError(f"{task}: {subject} failed with {type(error).__name__}: {error}") from error
    if len(found.timings) < len(calls):
        return "the time budget left no round for it"
    timings = found.timings
    return _row(task, explanation, arrays, timings["own" if "own" in timings else "reference"], timings["reference"])


def _row(
    task: Task, explanation: ops.ExplainedCall, arrays: Mapping[str, Any], timing: Timing, reference: Timing
) -> Row:
    # The budget may end within a round.
    complete = min(timing.rounds, reference.rounds)
    work = _work(task, explanation, arrays)
    bound = work.bound(current_chip())
    return Row(
        op=task.case.op,
        model=task.case.model,
        case=task.case.name,
        dtype=task.dtype,
        direction=task.direction,
        asked=task.asked,
        ran=ran(task, explanation),
        wall_s=timing.wall_s[:complete],
        cpu_s=timing.cpu_s[:complete],
        reference_wall_s=reference.wall_s[:complete],
        reference_cpu_s=reference.cpu_s[:complete],
        flops=work.flops,
        traffic_bytes=work.traffic_bytes,
        bound_s=bound.seconds if bound else None,
        denominator=bound.denominator if bound else None,
    )


def results(rows: Sequence[Row]) -> Results:
    """Combines rows with the date, the chip and the versions of this process."""
    chip = current_chip()
    return Results(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        chip=chip.kind,
        model=chip.model,
        provenance=chip.provenance,
        versions={name: version(name) for name in _VERSIONS},
        rows=tuple(rows),
    )


def _on_one_device(call: Callable[[Mapping[str, Any]], Any], axis: str) -> Callable[[Mapping[str, Any]], Any]:
    """Wraps the call in a mesh of one device, which has the full sequence of every array [batch, seq, ...]."""
    mesh, split = jax.make_mesh((1,), (axis,), axis_types=(AxisType.Auto,)), P(None, axis)
    return jax.shard_map(call, mesh=mesh, in_specs=(split,), out_specs=split)


def _is_floating(array: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array))


def explained(task: Task, arrays: Mapping[str, Any]) -> ops.ExplainedCall | UnsupportedOp:
    """Returns the implementations chosen for the call, or the error if it is unsupported.

    Args:
      task: the task.
      arrays: the case's arrays, or their shapes and dtypes.
    """
    (found,) = ops.explain(task.call(task.asked or None), arrays)
    for choice in (found.forward, found.backward) if task.direction == "gradient" else (found.forward,):
        if isinstance(choice, UnsupportedOp):
            return choice
        if isinstance(choice, StackError):
            raise choice
    return found


def ran(task: Task, explanation: ops.ExplainedCall) -> str:
    """Names the implementations of a task with their configs, only once if both directions share it."""
    forward, backward = _named(explanation.forward), _named(explanation.backward)
    return forward if task.direction == "forward" or forward == backward else f"{forward}, backward {backward}"


def _named(choice: Any) -> str:
    config = "" if choice.config is None else f" {choice.config}"
    return f"{choice.implementation.name}{config}"


def _work(task: Task, explanation: ops.ExplainedCall, arrays: Mapping[str, Any]) -> Work:
    call = explanation.call
    integers = {
        name: np.asarray(x)
        for name, x in arrays.items()
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.integer)
    }
    work = work_of(call, integers)
    if task.direction == "forward":
        return work
    return work + work_of(dataclasses.replace(call, direction="backward"), integers)
