"""Products of two fp8 or fp4 operands through bf16, which represents all of their values exactly."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import QView
from stack_core.chips.machine import cpu_flags
from stack_core.ops.building import QuantizedArray
from stack_kernels.linear.codes import columns, decoded, interleaved
from stack_kernels.linear.integer_dot import by_row
from stack_kernels.linear.product import product

__all__ = ["float_dot", "has_float_dot"]

_HELD = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def has_float_dot(x: QView, weight: QView) -> bool:
    """Checks for fp8 or fp4 operands with one scale per row and per column, and a processor with bf16 tiles.

    Other processors multiply bf16 no faster than fp32.
    """
    are_held = all(view.qvalue.dtype.name in _HELD and view.zero_point is None for view in (x, weight))
    return are_held and x.scale.shape[-1] == len(weight.scale) == 1 and _has_tiles()


def float_dot(x: QView, weight: QuantizedArray) -> jax.Array:
    """Computes x W in float32[rows, d_out]: products of values are exact and summed in fp32 before scaling."""
    *batch, d_in = x.qvalue.shape
    view = decoded(x)
    rows, scale = _as_bf16(view.qvalue.reshape(-1, d_in)), by_row(view.scale, batch)
    products = [
        product(rows, _as_bf16(part.decode(part.stored)), jnp.float32) * (scale * part.scale)
        for part in columns(weight)
    ]
    return interleaved(products)


@functools.cache
def _has_tiles() -> bool:
    return "amx_bf16" in cpu_flags()


def _as_bf16(values: jax.Array) -> jax.Array:
    """Converts to bf16 behind a barrier, which keeps the conversion out of the product, where it is slow."""
    return lax.optimization_barrier(values.astype(jnp.bfloat16))
