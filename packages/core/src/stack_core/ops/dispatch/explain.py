"""Explanation of the implementation choices for all op calls in a function, by tracing without execution."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from stack_core.abi.chips import Chip
from stack_core.abi.errors import StackError
from stack_core.abi.ops import OpCall
from stack_core.chips.context import target, target_platform, use_chip
from stack_core.ops.dispatch.choosing import Choice, Plan, format_shapes, plan
from stack_core.ops.dispatch.dispatch import recording, run
from stack_core.ops.dispatch.request import Request
from stack_core.programs.flops import inner_jaxprs

__all__ = ["ExplainedCall", "Explanation", "explain"]

# Stack frames between an op and the line that calls it: core itself, JAX transformations and run-time type checks.
_NOT_THE_CALLER = frozenset({"stack_core", "jax", "jaxtyping"})


@dataclass(frozen=True)
class ExplainedCall:
    """Group of equal calls of an op: same source line, shapes, dtypes, options and choices.

    Attributes:
      op: name of the op.
      arrays: dtype and shape by parameter name as seen by the op; of a single element under `vmap`.
      options: other arguments that differ from the op's defaults.
      forward: implementation of the forward pass with config and reason; or the error that the call raises.
      backward: implementation of the backward pass if the call is differentiated; or the error that this raises.
      calls: number of forward passes in one call of the function. A scan counts each trip, recomputation under
        `jax.checkpoint` counts again, each branch of a `cond` counts as if taken, and unused results count 0.
      at_least: whether the call is in a `while` loop, whose unknown number of trips counts as one.
      source: "path:line" of the caller outside of stack_core.
      call: forward pass of the call, as passed to implementations.
      differentiated: array arguments that are differentiated in forward or reverse mode.
    """

    op: str
    arrays: Mapping[str, str]
    options: Mapping[str, Any]
    forward: Choice | StackError
    backward: Choice | StackError
    calls: int
    at_least: bool
    source: str
    call: OpCall
    differentiated: tuple[str, ...] = ()


class Explanation(tuple[ExplainedCall, ...]):
    """Tuple of calls in the order of tracing; `str` and `repr` format it as a table."""

    def __str__(self) -> str:
        if not self:
            return "No op of stack_core.ops is called."
        rows = [("calls", "op", "pass", "implementation", "config", "why"), *_rows(self)]
        widths = [max(len(row[column]) for row in rows if isinstance(row, tuple)) for column in range(5)]
        return "\n".join(_line(row, widths) for row in rows)

    __repr__ = __str__  # the value of a notebook's cell


def explain(fn: Callable[..., Any], *args: Any, chip: Chip | None = None) -> Explanation:
    """Explains which implementation each op call in `fn(*args)` uses, forward and backward, and why.

    `fn` is traced, but not compiled or run. Calls inside jitted functions, loops, models and derivatives are included;
    calls inside compiled or exported programs are not. A call without a supported implementation is listed with its
    error, and tracing continues with the op's reference.

    The first use in a process makes JAX trace and compile again all functions that it compiled before.

    Args:
      fn: function to explain.
      args: pytrees. Leaves with a shape and a dtype are traced, including `jax.ShapeDtypeStruct`s; all other leaves are
        passed unchanged.
      chip: chip to explain for; by default the target of the surrounding context.

    Raises:
      UnsupportedOp: no implementation supports a call, not even the op's reference.
    """
    leaves, structure = jax.tree.flatten(args)
    places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]

    def traced(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return [leaf for leaf in jax.tree.leaves(fn(*jax.tree.unflatten(structure, filled))) if _is_array(leaf)]

    with contextlib.nullcontext() if chip is None else use_chip(chip):
        recorder = _Recorder(traces_kernels=_traces_kernels())
        with recording(recorder):
            jaxpr = jax.make_jaxpr(traced)(*(leaves[place] for place in places))
    counts = _Counts()
    counts.add(jaxpr, 1, is_lower_bound=False)
    return Explanation(_merged(recorder.explained(counts)))


def _traces_kernels() -> bool:
    """Checks whether kernels of the target can be traced here, without asking which devices are present."""
    return target.value is None or target_platform() == "cpu"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


@dataclass(eq=False)
class _Recorder:
    """Replacement of `run` that records each call, runs it, and marks its arguments and output.

    Attributes:
      traces_kernels: whether the chosen implementations are traced, not the references in their place. Some kernels
        inspect the local devices and can be traced only there.
    """

    traces_kernels: bool = True
    calls: list[ExplainedCall] = field(default_factory=list)
    differentiated: dict[tuple[int, str], None] = field(default_factory=dict)

    def __call__(self, request: Request, operands: Sequence[Any]) -> Any:
        number = len(self.calls)
        arrays, op = request.arrays(operands), request.op.name
        shapes = {name: format_shapes(array) for name, array in arrays.items() if array is not None}
        forward, backward, request = _planned(request, operands)
        alone = request.call(operands)
        self.calls.append(
            ExplainedCall(
                op, shapes, _non_default_options(op, request.options), forward, backward, 0, False, _caller(), alone
            )
        )
        marked = [_marked(array, number, name) for name, array in arrays.items()]
        if not isinstance(forward, StackError):
            stand_in = dataclasses.replace(request, implementation=request.op.implementation())
            request = dataclasses.replace(request, noted=functools.partial(self._note, number, stand_in, operands))
        return _marked(run(request, jax.tree.leaves(marked)), number, None)

    def _note(self, number: int, stand_in: Request, operands: Sequence[Any], chosen: Plan, call: OpCall) -> Plan:
        """Records a plan of a call; the last plan is the final one, with any mapped axis of a `vmap` folded in.

        Tracing continues with the reference's gradient if no implementation has one, and with the reference alone if
        kernels are not traced.
        """
        found = {"forward": chosen.forward, "backward": chosen.backward, "call": call}
        self.calls[number] = dataclasses.replace(self.calls[number], **found)
        # Only a missing gradient is replaced where kernels are traced; every choice must stay visible.
        if self.traces_kernels and isinstance(chosen.backward, Choice):
            return chosen
        with contextlib.suppress(StackError):
            reference = plan(stand_in, operands)
            return dataclasses.replace(chosen, backward=reference.backward) if self.traces_kernels else reference
        return chosen

    def explained(self, counts: "_Counts") -> Iterator[ExplainedCall]:
        """Yields the calls, completed by the counts and derivatives that are known after tracing."""
        for number, call in enumerate(self.calls):
            names = tuple(name for name in call.arrays if (number, name) in self.differentiated)
            times, at_least = counts.calls[number], number in counts.at_least
            yield dataclasses.replace(call, calls=times, at_least=at_least, differentiated=names)


def _planned(request: Request, operands: Sequence[Any]) -> tuple[Choice | StackError, Choice | StackError, Request]:
    """Returns the choices of a call, or their errors, and a request that can be traced in either case."""
    stand_in = dataclasses.replace(request, implementation="reference")
    try:
        chosen = plan(request, operands)
    except StackError as error:
        with contextlib.suppress(StackError):
            plan(stand_in, operands)
            return error, error, dataclasses.replace(stand_in, noted=lambda chosen, call: chosen)
        raise
    return chosen.forward, chosen.backward, request


def _non_default_options(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that differ from the defaults of the op's public function, which is found on the stack."""
    function = next((frame.f_globals.get(op) for frame in _frames() if frame.f_code.co_name == op), None)
    if function is None:
        return dict(options)
    parameters = inspect.signature(function).parameters
    return {
        name: value for name, value in options.items() if name not in parameters or value != parameters[name].default
    }


def _caller() -> str:
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_CALLER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def _frames() -> Iterator[FrameType]:
    """Yields the frames of the stack from the innermost outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _marked(arrays: Any, call: int, argument: str | None) -> Any:
    """Applies the marker to the arrays of an argument or of the output of a call."""
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, _marker().bind(*leaves, call=call, argument=argument)) if leaves else arrays


@functools.cache
def _marker() -> Any:
    """Returns an identity primitive that stays in a jaxpr as long as one of its operands is used.

    Its parameters are the number of a call and the name of the marked argument, None for the output. Its JVP rule
    reports to the current recorder which arguments are differentiated, because a jaxpr does not show this afterwards.
    """
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    marker = Primitive("stack_op_call")
    marker.multiple_results = True

    def jvp(primals: Any, tangents: Any, *, call: int, argument: str | None) -> Any:
        if argument is not None and isinstance(recording.value, _Recorder):
            recording.value.differentiated[call, argument] = None
        return marker.bind(*primals, call=call, argument=argument), list(tangents)

    marker.def_impl(lambda *arrays, **mark: list(arrays))
    marker.def_abstract_eval(lambda *arrays, **mark: list(arrays))
    ad.primitive_jvps[marker] = jvp
    batching.primitive_batchers[marker] = lambda arrays, axes, **mark: (marker.bind(*arrays, **mark), axes)
    mlir.register_lowering(marker, lambda context, *arrays, **mark: list(arrays))
    return marker


@dataclass
class _Counts:
    """Execution counts of a jaxpr's calls by number, and the calls in loops of unknown length."""

    calls: Counter[int] = field(default_factory=Counter)
    at_least: set[int] = field(default_factory=set)

    def add(self, jaxpr: Any, times: int, *, is_lower_bound: bool) -> None:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:  # closed or not: JAX 0.11 made them one class
            if equation.primitive is _marker() and equation.params["argument"] is None:
                self.calls[equation.params["call"]] += times
                if is_lower_bound:
                    self.at_least.add(equation.params["call"])
            trips = equation.params["length"] if equation.primitive.name == "scan" else 1
            for inner in inner_jaxprs(equation.params.values()):
                self.add(inner, times * trips, is_lower_bound=is_lower_bound or equation.primitive.name == "while")


def _merged(recorded: Iterable[ExplainedCall]) -> list[ExplainedCall]:
    merged: list[ExplainedCall] = []
    for call in recorded:
        place = next((place for place, other in enumerate(merged) if _alike(call, other)), None)
        if place is None:
            merged.append(call)
            continue
        other = merged[place]
        merged[place] = dataclasses.replace(
            other,
            calls=other.calls + call.calls,
            at_least=other.at_least or call.at_least,
            differentiated=tuple(name for name in call.arrays if name in other.differentiated + call.differentiated),
        )
    return merged


def _alike(one: ExplainedCall, other: ExplainedCall) -> bool:
    def compared(call: ExplainedCall) -> tuple[Any, ...]:
        choices = (str(x) if isinstance(x, StackError) else x for x in (call.forward, call.backward))
        return (call.op, call.source, call.arrays, call.options, *choices)

    return compared(one) == compared(other)


def _rows(explanation: Explanation) -> Iterator[tuple[str, ...] | str]:
    """Yields rows of six columns, or lines that span them."""
    for call in explanation:
        passes = {"forward": call.forward, "backward": call.backward}
        if isinstance(call.forward, StackError):
            del passes["backward"]  # same error as forward
        titles = iter([f"{call.calls}{'+' if call.at_least else ''}", call.op])
        for direction, choice in passes.items():
            yield next(titles, ""), next(titles, ""), direction, *_columns(choice)
        arguments = [f"{name} {array}" for name, array in call.arrays.items()]
        yield ", ".join(arguments + [f"{name}={option}" for name, option in call.options.items()])
        for direction, choice in passes.items():
            yield from _details(direction, choice)
        path, _, line = call.source.rpartition(":")
        if path:
            yield f"at {'/'.join(Path(path).parts[-2:])}:{line}"


def _columns(choice: Choice | StackError) -> tuple[str, str, str]:
    """Returns the columns implementation, config and reason."""
    if isinstance(choice, StackError):
        return "none", "", f"{type(choice).__name__}: {str(choice).splitlines()[0]}"
    return choice.implementation.name, "" if choice.config is None else str(choice.config), choice.reason


def _details(direction: str, choice: Choice | StackError) -> Iterator[str]:
    """Yields the reasons against the other implementations."""
    if isinstance(choice, StackError):
        yield from str(choice).splitlines()[1:]
    else:
        yield from (f"not {name} {direction}: {reason}" for name, reason in choice.refused)


def _line(row: tuple[str, ...] | str, widths: Sequence[int]) -> str:
    if isinstance(row, str):
        return " " * (widths[0] + widths[1] + 4) + row
    calls, *texts, why = row
    padded = [text.ljust(width) for text, width in zip(texts, widths[1:], strict=True)]
    return "  ".join([calls.rjust(widths[0]), *padded, why]).rstrip()
