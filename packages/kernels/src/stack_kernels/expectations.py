"""Support and expected speed of an op's implementations on a chip, with the source of each figure."""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.errors import ArgumentError, StackError, TuningError
from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.chips import Chip, target_chip, use_chip
from stack_core.ops.building import answer, implementations_of, supporting
from stack_core.ops.defining import function_of
from stack_kernels.roofline import work_of
from stack_kernels.tuning.costs import estimate_s
from stack_kernels.tuning.lookup import duration
from stack_kernels.tuning.shapes import CallShape, shape_of
from stack_kernels.tuning.sources import DamagedTableWarning, table_files
from stack_kernels.tuning.tables import ChipName, Measurement, Table
from stack_kernels.user_kernels import parameters_of

__all__ = ["Expectation", "Expectations", "expected"]

# Op parameters that are integer or boolean arrays; shapes passed for them get these dtypes.
_INTEGERS = frozenset({
    "block_tables", "group_sizes", "kv_lengths", "labels", "positions", "query_offset", "query_starts", "rows",
    "segment_ids",
})  # fmt: skip
_BOOLEANS = frozenset({"mask"})
_FARTHEST = 3.0  # largest `CallShape.distance` that counts, as in lookup


@dataclass(frozen=True)
class Expectation:
    """Expected speed of one implementation on one chip.

    Attributes:
      implementation: name of the implementation.
      refusal: reason why it does not support the call; "" if it does.
      chosen: True if core would choose it.
      config: fastest known config, in the form of a tuned table.
      seconds: time of one call; None if unknown.
      basis: "measured" at this size, "predicted" by the cost model from other sizes, "bound" by the chip's peaks (a
        lower limit, not the likely time), or "unknown".
      provenance: measurements or peak behind `seconds`, in words.
    """

    implementation: str
    refusal: str
    chosen: bool
    config: Any
    seconds: float | None
    basis: str
    provenance: str

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.implementation}: not supported: {self.refusal}"
        name = self.implementation + ("" if self.config is None else f" {self.config}")
        chosen = " (chosen)" if self.chosen else ""
        if self.seconds is None:
            return f"{name}{chosen}: supported, time not known: {self.provenance}"
        word = "at least" if self.basis == "bound" else "about" if self.basis == "predicted" else "takes"
        return f"{name}{chosen}: {word} {duration(self.seconds)}, {self.provenance}"


class Expectations(tuple[Expectation, ...]):
    """One row per implementation: supported ones by increasing time, then unsupported ones."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def expected(
    op: str,
    shapes: Mapping[str, Any],
    chip: Chip | str | None = None,
    *,
    dtype: str = "bfloat16",
    direction: str = "forward",
    **options: Any,
) -> Expectations:
    """Estimates the time of one call of an op with each implementation on a chip. Nothing runs; the chip may be absent.

        print(stack_kernels.expected("linear", {"x": (8, 4096), "weight": (4096, 14336)}, "h200"))

    Args:
      op: name of a function of `stack_core.ops`.
      shapes: the op's arrays by parameter name: a shape, which gets `dtype` (int32 if the op takes integers, bool for
        masks), or any object with a shape and a dtype, including quantized arrays and pytrees.
      chip: name such as "h200" or "v5p" (`stack chips` lists them), or a `Chip`; defaults to the target chip.
      dtype: dtype of floating arrays passed as shapes.
      direction: "forward" or "backward".
      options: the op's other arguments, such as `causal=True`.

    Raises:
      UnknownName: the op or the chip is unknown.
      ArgumentError: unknown parameter or direction, or arguments that the op rejects.
    """
    known = parameters_of(op)
    if unknown := [name for name in (*shapes, *options) if name not in known]:
        raise ArgumentError(f"{op} has no parameter {unknown[0]!r}; its parameters are {', '.join(known)}.")
    if direction not in ("forward", "backward"):
        raise ArgumentError(f"direction is {direction!r}; expected 'forward' or 'backward'.")
    structs = {name: _struct(name, shape, dtype) for name, shape in shapes.items()}
    target = _chip(chip)
    with use_chip(target):
        try:
            # The function contains a single call.
            (explained,) = ops.explain(lambda structs: function_of(op)(**structs, **options), structs)
        except TypeError as error:  # an argument is missing
            raise ArgumentError(
                f"{op} cannot be called like this: {error}. Its parameters are {', '.join(known)}."
            ) from error
        call = dataclasses.replace(explained.call, direction=direction)
        # Within `use_chip`: implementations ask for the target chip.
        able = supporting(call)
        choice = getattr(explained, direction)
    chosen = None if isinstance(choice, StackError) else choice.implementation.name
    tables = list(_tables_of(ChipName.of(target)))
    rows = [_expectation(name, call, target, tables, chosen == name) for name in able]
    # Implementations of unknown speed come last.
    rows.sort(key=lambda row: math.inf if row.seconds is None else row.seconds)
    unsupported = (_refusal(found, call, target) for name, found in implementations_of(op).items() if name not in able)
    return Expectations((*rows, *unsupported))


def _struct(name: str, shape: Any, dtype: str) -> Any:
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shape)
    kind = "int32" if name in _INTEGERS else "bool" if name in _BOOLEANS else dtype
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(kind))


def _chip(chip: Chip | str | None) -> Chip:
    if chip is None or isinstance(chip, Chip):
        return chip or target_chip()
    row = registries.chips[chip]
    return row if isinstance(row, Chip) else row()


def _refusal(found: OpImplementation, call: OpCall, chip: Chip) -> Expectation:
    with use_chip(chip):
        reason = answer(found, call)
    return Expectation(found.name, str(reason or "no reason given"), False, None, None, "unknown", "")


def _tables_of(chip: ChipName) -> Iterator[tuple[Path, Table]]:
    for path in table_files():
        try:
            table = Table.read(path)
        except TuningError as error:
            warnings.warn(f"{error} It is left out of what is expected.", DamagedTableWarning, stacklevel=3)
            continue
        if table.chip == chip:
            yield path, table


def _expectation(
    name: str, call: OpCall, chip: Chip, tables: Sequence[tuple[Path, Table]], chosen: bool
) -> Expectation:
    """Estimates from measurements at these sizes, else from nearby sizes, else from the chip's peaks."""
    shape = shape_of(call)
    found = [(path, each) for path, table in tables for each in table.measurements if _is_near(each, name, call, shape)]
    here = [(path, each) for path, each in found if each.case.shape.bucket == shape.bucket]
    if here:
        path, best = min(here, key=lambda item: item[1].median_s)
        return Expectation(name, "", chosen, best.config, best.median_s, "measured", _measured(path, best))
    if found:
        return _predicted(name, found, shape, chosen)
    bound = work_of(call).bound(chip)
    if bound is None:
        missing = f"no measurement, and no row of peaks of {chip.kind} for its dtype"
        return Expectation(name, "", chosen, None, None, "unknown", missing)
    provenance = f"by its roofline of {bound.denominator}; no measurement ({chip.kind}: {chip.provenance})"
    return Expectation(name, "", chosen, None, bound.seconds, "bound", provenance)


def _is_near(found: Measurement, name: str, call: OpCall, shape: CallShape) -> bool:
    is_it = (found.implementation, found.case.direction, found.outcome) == (name, call.direction, "measured")
    return is_it and found.case.shape.distance(shape) <= _FARTHEST


def _predicted(name: str, found: Sequence[tuple[Path, Measurement]], shape: CallShape, chosen: bool) -> Expectation:
    by_candidate: dict[tuple[str, str], list[tuple[Path, Measurement]]] = {}
    for path, each in found:
        by_candidate.setdefault(each.candidate, []).append((path, each))
    estimates = [
        (estimate_s([(each.case.shape, each.median_s) for _, each in group], shape), group)
        for group in by_candidate.values()
    ]
    seconds, group = min(estimates, key=lambda item: item[0])
    path, nearest = min(group, key=lambda item: item[1].case.shape.distance(shape))
    provenance = f"by the cost model from {len(group)} measurements, the nearest {_measured(path, nearest)}"
    return Expectation(name, "", chosen, nearest.config, seconds, "predicted", provenance)


def _measured(path: Path, found: Measurement) -> str:
    scope = "value and gradient" if found.whole else found.case.direction
    versions = ", ".join(f"{package} {number}" for package, number in found.versions.items() if package == "jax")
    where = f"{found.case.shape} ({scope}, {found.rounds} rounds, {versions}, {found.date[:10]})"
    return f"measured at {where} in {path.name}"
