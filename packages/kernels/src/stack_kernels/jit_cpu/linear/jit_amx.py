"""`linear` on processors with AMX: bf16 products in tiles, in machine code, forward and backward."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import as_backward, is_quantized
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.tiled_product import GRAIN, TiledProduct, tiled_module
from stack_kernels.linear.product import Products
from stack_kernels.linear.xla_cpu import linear, linear_gradients

__all__ = ["JIT_AMX", "TILED", "run", "supports_tiles"]

_MIN_ROWS = 7
"""Fewer rows are faster in `jit_x86`."""


def supports_tiles(call: OpCall, chip: Chip, config: Any = None, *, weights: tuple[str, ...], rows: str) -> bool | str:
    """Checks for bf16 operands with weight sizes that are multiples of 32, and at least 7 rows."""
    answer = host.on_this_cpu(call, chip)
    if answer is not True:
        return answer
    processor = host.this_processor()
    if processor is None or not processor.has_tiles:
        return "it is for processors with AMX"
    arrays = call.arrays
    for name in (rows, *weights):
        if is_quantized(arrays[name]) or arrays[name].dtype != jnp.bfloat16:
            return f"it is for bf16, and {name} is another type"
    for name in weights:
        if any(size % GRAIN for size in arrays[name].shape):
            return f"it is for sizes that {GRAIN} divides, and {name} is {arrays[name].shape}"
    count = math.prod(arrays[rows].shape[:-1])
    return count >= _MIN_ROWS or f"it is for {_MIN_ROWS} rows or more, and {rows} has {count}"


def run(product: TiledProduct, rows: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """Returns the results of a product."""
    columns = weights[0].shape[0 if product.is_transposed else 1]
    results = [jax.ShapeDtypeStruct((len(rows), columns), product.result)] * (3 if product.keeps_products else 1)
    flops = 2 * rows.size * columns * len(weights)
    return host.kernel_call(
        product.name, functools.partial(tiled_module, product), results, rows, *weights, flops=flops
    )


def _product(is_transposed: bool, rows: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    result = "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"
    return run(TiledProduct(result, is_transposed), rows, weight)[0].astype(dtype)


def _weight_gradient(columns: jax.Array, cotangent: jax.Array, dtype: DTypeLike) -> jax.Array:
    missing = -len(cotangent) % GRAIN
    if missing:
        columns, cotangent = jnp.pad(columns, ((0, 0), (0, missing))), jnp.pad(cotangent, ((0, missing), (0, 0)))
    return _product(False, columns, cotangent, dtype)


TILED = Products(functools.partial(_product, False), functools.partial(_product, True), _weight_gradient)
"""Products of bf16 matrices; columns and summed axes, except rows, must be multiples of 32."""

JIT_AMX = OpImplementation(
    op="linear",
    name="jit_amx",
    forward=functools.partial(linear, TILED),
    backward=as_backward(functools.partial(linear_gradients, TILED)),
    platforms=("cpu",),
    supports=functools.partial(supports_tiles, weights=("weight",), rows="x"),
    is_opaque=True,
    exports=False,
    priority=3,
)
