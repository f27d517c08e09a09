"""Rotations that leave a program unchanged, derived from its trace.

For each operation the analysis finds the axes of its operands and results that have one basis. A product sums over an
axis of both factors, x W = (x R) (R^T W), so both are rotated together. The terms of a sum have one basis, and so has
the carry of a loop, such as a residual stream. An RMS norm without a scale commutes with rotations, and its scale
belongs to the matrices that multiply the result. Operations that distinguish the entries of an axis fix its basis, and
so do unknown operations, inputs and results. The results do not depend on the remaining bases.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from stack_core.ops.units import unit_of
from stack_quant.rotations.bases import Axis, Basis, fix, merged, parts_of
from stack_quant.transform import versions
from stack_quant.transform.provenance import Source

__all__ = ["PRIMITIVES", "UNITS", "NormScale", "Symmetries", "Tracked", "find_symmetries", "fixed", "free_axes"]


@dataclass(eq=False)
class NormScale:
    """The scale of RMS norms, which a rotation moves into the matrices after the norm.

    Attributes:
      path: path of the parameter.
      offset: offset of the stored scale, as in `ops.norm`.
      axes: normalized axes.
      matrices: contracted axis of each matrix that multiplies a result, by path.
      blocked: reason why the scale cannot be moved; "" if it can.
    """

    path: str
    offset: float
    axes: list[Axis] = field(default_factory=list)
    matrices: dict[str, int] = field(default_factory=dict)
    blocked: str = ""

    def block(self, reason: str) -> None:
        self.blocked = self.blocked or reason


@dataclass(frozen=True)
class Tracked:
    """A value of the program.

    Attributes:
      axes: bases of its axes.
      source: parameter that the value is a rearrangement of, or None.
      number: number that all entries equal, or None.
      scale: scale that the value contains until a matrix takes it over, or None.
      loops: loops of which the parameter, or the scale, is the slice of one iteration, the outermost first.
    """

    axes: tuple[Axis, ...]
    source: Source | None = None
    number: float | None = None
    scale: NormScale | None = None
    loops: tuple[object, ...] = ()


PRIMITIVES: Final[dict[str, Callable[..., Sequence[Tracked]]]] = {}
"""Handlers (symmetries, equation, operands) of equations, by primitive."""

UNITS: Final[dict[str, Callable[..., Sequence[Tracked]]]] = {}
"""Handlers (symmetries, equation, operands) of calls of core's ops, by op."""


@dataclass
class Symmetries:
    """The bases of a program's parameters.

    Attributes:
      shapes: shape of each parameter, by path.
      parameters: bases of the axes of each parameter, by path.
      scales: scales of RMS norms, by path.
      uses: uses of each parameter by path: the scale that its product takes over, or None.
      tables: complete axes of the entries that are looked up from a parameter, by path.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, tuple[Axis, ...]]
    scales: dict[str, NormScale] = field(default_factory=dict)
    uses: dict[str, set[NormScale | None]] = field(default_factory=dict)
    tables: dict[str, list[Axis]] = field(default_factory=dict)

    def run(self, jaxpr: Any, values: Sequence[Tracked]) -> list[Tracked]:
        """Adds the operations of a jaxpr, and returns its results."""
        body = versions.equations_of(jaxpr)
        consts = [_constant(const) for const in versions.consts_of(jaxpr)]
        known = dict(zip((*body.constvars, *body.invars), (*consts, *values), strict=True))

        def read(atom: Any) -> Tracked:
            return _constant(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in body.eqns:
            operands = [read(atom) for atom in equation.invars]
            known.update(zip(equation.outvars, self._results(equation, operands), strict=True))
        return [read(atom) for atom in body.outvars]

    def _results(self, equation: Any, operands: Sequence[Tracked]) -> Sequence[Tracked]:
        unit, inner = unit_of(equation), versions.inner(equation)
        if inner is not None:
            return self.run(inner, operands)
        if unit is not None:
            handler = None if unit.batching else UNITS.get(unit.op)
        else:
            handler = PRIMITIVES.get(equation.primitive.name)
        return (handler or opaque)(self, equation, operands)

    def consume(self, value: Tracked, reason: str) -> None:
        """Records the use of a value by an operation that does not take over the scale of a norm."""
        if value.scale is not None:
            value.scale.block(f"{reason} uses the result of the norm")
        for path in () if value.source is None else value.source.paths:
            self.uses.setdefault(path, set()).add(None)

    def contract(self, first: Tracked, axis: int, second: Tracked, other: int, reason: str) -> None:
        """Adds a sum over an axis of two factors. A matrix takes over the scale in the other factor."""
        merged((first.axes[axis], second.axes[other]), reason)
        for value, at, matrix, place in ((first, axis, second, other), (second, other, first, axis)):
            if value.scale is not None:
                self._take_over(value.scale, value, at, matrix, place, reason)
            elif matrix.source is not None:
                self.consume(replace(matrix, scale=None), reason)

    def _take_over(self, scale: NormScale, value: Tracked, at: int, matrix: Tracked, place: int, reason: str) -> None:
        scaled, found = [parts_of(each) for each in scale.axes], self.parameter_axis(matrix, place)
        # Each layer of a stacked scale belongs to the same layer of the matrix.
        is_aligned = matrix.loops[: len(value.loops)] == value.loops
        if found is None or parts_of(value.axes[at]) not in scaled or not is_aligned:
            self.consume(value, reason)
            self.consume(matrix, reason)
            return
        path, axis = found
        if scale.matrices.setdefault(path, axis) != axis:
            scale.block(f"it scales two axes of {path}")
        self.uses.setdefault(path, set()).add(scale)

    def parameter_axis(self, value: Tracked, axis: int) -> tuple[str, int] | None:
        """Returns the path and the axis of a parameter of which an axis of a value is one complete axis, or None."""
        source = value.source
        if source is None or source.others or len(source.axes[axis]) != 1:
            return None
        (part,) = source.axes[axis]
        is_complete = part.stride == 1 and not part.cut and part.size == self.shapes[source.path][part.axis]
        return (source.path, part.axis) if is_complete else None


def opaque(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Returns the results of an operation that distinguishes all entries of its operands."""
    unit = unit_of(equation)
    name = equation.primitive.name if unit is None else unit.op
    for operand in operands:
        found.consume(operand, name)
        for axis in operand.axes:
            fix(axis, name)
    return [fixed(variable.aval.shape, name) for variable in equation.outvars]


def find_symmetries(jaxpr: Any, shapes: Mapping[str, tuple[int, ...]]) -> Symmetries:
    """Analyzes a traced call.

    Args:
      jaxpr: jaxpr whose first inputs are the parameters.
      shapes: shapes of the parameters by path, in the order of the inputs.
    """
    found = Symmetries(shapes, {path: free_axes(shape) for path, shape in shapes.items()})
    values = [Tracked(found.parameters[path], Source.of(path, shape)) for path, shape in shapes.items()]
    inputs = versions.equations_of(jaxpr).invars[len(values) :]
    values += [fixed(variable.aval.shape, "an input of the call") for variable in inputs]
    for result in found.run(jaxpr, values):
        found.consume(result, "the result of the call")
        for axis in result.axes:
            fix(axis, "the result of the call")
    for scale in found.scales.values():
        _settle(found, scale)
    return found


def _settle(found: Symmetries, scale: NormScale) -> None:
    """Fixes the axes of norms whose scale cannot be moved."""
    shape = found.shapes[scale.path]
    if found.uses.get(scale.path):
        scale.block("it is also used outside of norms")
    if not scale.matrices:
        scale.block("no matrix multiplies the result of the norm")
    for matrix, axis in scale.matrices.items():
        layers = found.shapes[matrix][: len(shape) - 1]
        if found.uses[matrix] != {scale}:
            scale.block(f"{matrix} is also used without it")
        elif layers != shape[:-1] or axis < len(layers):
            scale.block(f"{matrix} has other layers")
    if scale.blocked:
        for axis in scale.axes:
            fix(axis, f"the scale {scale.path} of a norm stays, because {scale.blocked}")


def free_axes(shape: Sequence[int]) -> tuple[Axis, ...]:
    """Returns new bases of the axes of a value."""
    return tuple((Basis(size),) if size > 1 else None for size in shape)


def fixed(shape: Sequence[int], reason: str) -> Tracked:
    """Returns a value with axes that cannot be rotated."""
    return Tracked(tuple((Basis(size, fixed=reason),) if size > 1 else None for size in shape))


def _constant(array: Any) -> Tracked:
    if np.ndim(array) == 0 and isinstance(array, np.ndarray | np.generic | float | int):
        return Tracked((), number=float(array))
    return fixed(jnp.shape(array), "a constant")
