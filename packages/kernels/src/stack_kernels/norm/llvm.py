"""`norm` of many rows on CPUs, in machine code: each row is read once, by all processors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi import OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_kernels.llvm import host
from stack_kernels.llvm.many_numbers import supports_many
from stack_kernels.norm.llvm_rows import RowNorm, norm_module

__all__ = ["LLVM"]


def _supports(call: OpCall, chip: Chip) -> bool | str:
    x, axis = call.arrays["x"], call.options["axis"]
    answer = supports_many(call, chip, x.size)
    if answer is not True:
        return answer
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(call.arrays))):
        return "it computes in float32, and an array is float64"
    return axis == x.ndim - 1 or f"it normalizes the last axis, and not axis {axis} of {x.ndim}"


def _norm(
    x: Any, scale: Any, *, offset: Any, residual: Any, kind: str, epsilon: float, scale_offset: float, axis: int
) -> Any:
    norm = RowNorm(x.dtype.name, kind == "layer", residual is not None, scale is not None, offset is not None)
    rows = [array.reshape(-1, x.shape[-1]) for array in (x, residual) if array is not None]
    scales = [] if scale is None else [scale.astype(jnp.float32) + scale_offset]
    offsets = [] if offset is None else [offset.astype(jnp.float32)]
    results = [jax.ShapeDtypeStruct(rows[0].shape, x.dtype) for _ in rows]
    build = functools.partial(norm_module, norm)
    given = (*rows, *scales, *offsets, jnp.full(1, epsilon, jnp.float32))
    found = [result.reshape(x.shape) for result in host.kernel_call(norm.name, build, results, *given)]
    return found[0] if residual is None else tuple(found)


LLVM = OpImplementation(op="norm", name="llvm", function=_norm, supports=_supports, priority=2)
