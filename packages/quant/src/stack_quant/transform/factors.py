"""The factors of products with parameters, arranged for statistics: x[batch, rows, d_in] of each matrix."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.ops.units import OpUnit, unit_of
from stack_quant.transform.core_ops import ACTIVATIONS, WEIGHTS, unit_axis
from stack_quant.transform.interpreter import Value

__all__ = ["Factors", "factors"]

Axes = Sequence[int]


@dataclass(frozen=True)
class Factors:
    """The parameters of an operation and their factors.

    Attributes:
      op: name of the operation, without scopes.
      weights: contracted and batch axes of each operand that may be a parameter, by index of the operand.
      inputs: function from the operands of one call to the factors x[batch, rows, d_in]; None for a convolution and
        for mapped operations.
    """

    op: str
    weights: Mapping[int, tuple[Axes, Axes]]
    inputs: Callable[[Sequence[Any]], jax.Array] | None


def factors(equation: Any, operands: Sequence[Value]) -> Factors | None:
    """Returns the factors of an equation, or None unless it multiplies parameters with values that depend on data."""
    unit, name = unit_of(equation), equation.primitive.name
    if unit is not None:
        return _of_unit(unit, operands)
    places = [place for place, value in enumerate(operands) if _is_parameter(value)]
    if len(places) != 1 or not any(value.from_data for value in operands):
        return None
    (place,) = places
    if name == "dot_general" and place < 2:
        contracted, batch = equation.params["dimension_numbers"]
        other = 1 - place
        value = operands[other]
        free = [axis for axis in range(len(value.shape)) if axis not in {*contracted[other], *batch[other]}]
        order = [*batch[other], *free, *contracted[other]]
        sizes = [math.prod(value.shape[axis] for axis in axes) for axes in (batch[other], free, contracted[other])]
        weights = {place: (contracted[place], batch[place])}
        return Factors("dot_general", weights, lambda arrays: arrays[other].transpose(order).reshape(sizes))
    if name == "ragged_dot_general" and place == 1:
        numbers = equation.params["ragged_dot_dimension_numbers"]
        weights = {1: (numbers.dot_dimension_numbers[0][1], numbers.rhs_group_dimensions)}
        return Factors("ragged_dot", weights, lambda arrays: _of_groups(arrays[0], arrays[2]))
    if name == "conv_general_dilated" and place == 1:
        numbers = equation.params["dimension_numbers"].rhs_spec
        return Factors("conv", {1: ((*numbers[2:], numbers[1]), ())}, None)
    return None


def _is_parameter(value: Value) -> bool:
    return value.source is not None or value.is_concatenated


def _of_unit(unit: OpUnit, operands: Sequence[Value]) -> Factors | None:
    places = unit.arrays(range(len(operands)))
    weights = {
        places[argument]: axis
        for argument, axis in WEIGHTS.get(unit.op, {}).items()
        if isinstance(places[argument], int) and _is_parameter(operands[places[argument]])
    }
    if not weights:
        return None
    ((argument, _),) = ACTIVATIONS[unit.op].items()
    x = places[argument]
    if unit.batching:
        at = {place: ([unit_axis(unit, place, operands[place], axis)], ()) for place, axis in weights.items()}
        return Factors(unit.op, at, None)
    if unit.op == "ragged_dot":
        sizes = places["group_sizes"]
        return Factors(unit.op, {places["rhs"]: ((1,), (0,))}, lambda arrays: _of_groups(arrays[x], arrays[sizes]))
    at = {place: ([contracted], ()) for place, contracted in weights.items()}
    return Factors(unit.op, at, lambda arrays: arrays[x].reshape(1, -1, arrays[x].shape[-1]))


def _of_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns x[groups, rows, d_in] with zeros in the rows of other groups, which add nothing to a sum of squares."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
    return jnp.where(group[None, :, None] == jnp.arange(sizes.shape[0])[:, None, None], rows[None], 0)
