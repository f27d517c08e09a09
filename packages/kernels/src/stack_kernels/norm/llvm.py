"""`norm` of many rows on CPUs, in machine code: each row is read once, by all processors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi import OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_kernels.llvm import host
from stack_kernels.llvm.numbers import WRITTEN
from stack_kernels.norm.llvm_rows import RowNorm, norm_module

__all__ = ["LLVM"]

_LEAST_SIZE = 2**15
"""Fewer are left to XLA, which makes them part of what comes before or after."""


def _supports(call: OpCall, chip: Chip) -> bool | str:
    answer = host.on_this_cpu(call, chip)
    return answer if answer is not True else _fits(call)


def _fits(call: OpCall) -> bool | str:
    x = call.arrays["x"]
    if x.dtype.name not in WRITTEN:
        return f"it is for {', '.join(WRITTEN)}, and x is {x.dtype.name}"
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(call.arrays))):
        return "it computes in float32, and an array is float64"
    if call.options["axis"] != x.ndim - 1:
        return f"it normalizes the last axis, and not axis {call.options['axis']} of {x.ndim}"
    if x.size < _LEAST_SIZE:
        return f"it is for {_LEAST_SIZE} numbers or more, and x has {x.size}"
    return True


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
