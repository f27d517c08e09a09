"""Straight-through derivatives of products of codes.

Codes are not differentiable, so a product gets the derivative of the unrounded floats. For y = Q(x) W, where W is
the dequantized parameter, and its cotangent g:

    dL/dx = 1[x is not clipped] * g W^T

as in quantization-aware training. Adapters and other parameters before a quantized product can therefore be trained.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.calibration import calibration
from stack_quant.rules import Rule
from stack_quant.tiling import spread

__all__ = ["rounded", "straight_through", "within_range"]

# With a factor of at least 1, these ranges contain every entry.
_NEVER_CLIP = ("absmax", "minmax")


def straight_through(product: Callable[..., Any], operands: Sequence[Any], floats: Sequence[Any]) -> Any:
    """Computes `product(*operands)` with the derivative of `product(*floats)`.

    Args:
      operands: operands of the product; some are activations as codes, which are not differentiable.
      floats: the same operands with the activations in float, as returned by `within_range`.
    """
    places = [place for place, (one, other) in enumerate(zip(operands, floats, strict=True)) if one is not other]
    if not any(is_quantized(operands[place]) for place in places):
        return product(*operands)

    @jax.custom_jvp
    def function(codes: Sequence[Any], floats: Sequence[Any]) -> Any:
        merged = list(floats)
        for place, array in zip(places, codes, strict=True):
            merged[place] = array
        return product(*merged)

    def tangents(primals: Any, moved: Any) -> tuple[Any, Any]:
        codes, floats = primals
        leaves, structure = jax.tree.flatten(floats)
        directions = {
            place: direction
            for place, direction in enumerate(jax.tree.leaves(moved[1], is_leaf=_is_zero))
            if not _is_zero(direction) and jnp.issubdtype(jax.typeof(leaves[place]).dtype, jnp.inexact)
        }

        def in_float(*values: Any) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(directions, values, strict=True))
            return product(*jax.tree.unflatten(structure, [filled[place] for place in range(len(leaves))]))

        result = function(codes, floats)
        if not directions:
            return result, jax.tree.map(jnp.zeros_like, result)
        return result, jax.jvp(in_float, [leaves[place] for place in directions], list(directions.values()))[1]

    # With symbolic zeros, only operands that move are differentiated.
    function.defjvp(tangents, symbolic_zeros=True)
    return function(lax.stop_gradient([operands[place] for place in places]), list(floats))


def rounded(operand: Any, in_float: Any, dtype: Any) -> Any:
    """Dequantizes an activation, with the derivative of its floats; returns any other operand unchanged."""
    if operand is in_float:
        return operand
    return straight_through(functools.partial(ops.dequantize, dtype=dtype), [operand], [in_float])


def within_range(array: Any, codes: Any, rule: Rule) -> Any:
    """Returns the array, with zero derivative at the entries that are clipped in its codes.

    Args:
      codes: quantized form of the array.
      rule: rule by which it was quantized.
    """
    found = calibration(rule.activation_calibration)
    if not rule.is_static and found.name in _NEVER_CLIP and found.arguments[0] >= 1:
        return array
    kind, scale = codes.qtype, codes.full_scale
    # The outermost code also represents values up to half a step beyond.
    margin = np.float32(0.5 if kind.is_integer else 0)
    smallest = -kind.largest if codes.zero_point is None else kind.smallest
    zero = np.float32(0) if codes.zero_point is None else codes.zero_point.astype(jnp.float32)
    ends = ((end - zero) * scale for end in (np.float32(smallest) - margin, np.float32(kind.largest) + margin))
    low, high = (spread(lax.stop_gradient(end), array.shape) for end in ends)
    whole = array.astype(jnp.float32)
    return jnp.where((whole >= low) & (whole <= high), array, lax.stop_gradient(array))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)
