"""`norm` of many rows on CPUs, in machine code, forward and backward, with rows split over threads."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from stack_core import ops
from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.many_numbers import supports_many_rows
from stack_kernels.jit_cpu.norm.gradient import column_gradients, gradient_module, gradient_name, parts
from stack_kernels.jit_cpu.norm.rows import RowNorm, norm_module

__all__ = ["JIT_X86"]


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    x, axis = call.arrays["x"], call.options["axis"]
    answer = supports_many_rows(call, chip, math.prod(x.shape[:-1]))
    if answer is not True:
        return answer
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(call.arrays))):
        return "it computes in float32, and an array is float64"
    return axis == -1 or f"it normalizes the last axis, and not axis {axis + x.ndim} of {x.ndim}"


def _row_norm(x: Any, scale: Any, offset: Any, residual: Any, kind: str) -> RowNorm:
    return RowNorm(x.dtype.name, kind == "layer", residual is not None, scale is not None, offset is not None)


def _norm(
    x: Any, scale: Any, *, offset: Any, residual: Any, requested: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    run = custom_vmap(functools.partial(_normed, **options))

    @run.def_vmap
    def _(size: int, mapped: Sequence[Any], *arrays: Any) -> tuple[Any, Any]:
        """The kernel takes one scale, so XLA normalizes examples that have a scale each."""

        def by_reference(x: Any, scale: Any, offset: Any, residual: Any) -> Any:
            return ops.norm(x, scale, offset=offset, residual=residual, implementation="reference", **options)

        in_axes = tuple(0 if is_mapped is True else None for is_mapped in mapped)
        found = jax.vmap(by_reference, in_axes=in_axes, axis_size=size)(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    return run(x, scale, offset, residual), {}


def _normed(
    x: Any, scale: Any, offset: Any, residual: Any, *, kind: str, epsilon: float, scale_offset: float, axis: int
) -> Any:
    norm = _row_norm(x, scale, offset, residual, kind)
    rows = [array.reshape(-1, x.shape[-1]) for array in (x, residual) if array is not None]
    scales = [] if scale is None else [scale.astype(jnp.float32) + scale_offset]
    offsets = [] if offset is None else [offset.astype(jnp.float32)]
    results = [jax.ShapeDtypeStruct(rows[0].shape, x.dtype) for _ in rows]
    build = functools.partial(norm_module, norm)
    # Epsilon is an operand: as a constant of the code, each value would compile its own kernel.
    operands = (*rows, *scales, *offsets, jnp.full(1, epsilon, jnp.float32))
    found = [result.reshape(x.shape) for result in host.kernel_call(norm.name, build, results, *operands)]
    return found[0] if residual is None else tuple(found)


@as_backward
def _backward(call: BackwardCall) -> Mapping[str, Any]:
    arrays, options = call.arrays, call.options
    x, scale, offset, residual = (arrays[name] for name in ("x", "scale", "offset", "residual"))
    norm = _row_norm(x, scale, offset, residual, options["kind"])
    # With a residual, the rows that were normed are the returned sum, whose cotangent is the second one.
    of_rows = (x, call.cotangents) if residual is None else (call.outputs[1], *call.cotangents)
    rows = [array.reshape(-1, x.shape[-1]) for array in of_rows]
    scales = [] if scale is None else [scale.astype(jnp.float32) + options["scale_offset"]]
    count, size = rows[0].shape
    names = column_gradients(norm)
    results = [jax.ShapeDtypeStruct((count, size), x.dtype)]
    for _ in names:
        results += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((size,), (parts(count, size), size))]
    build = functools.partial(gradient_module, norm)
    operands = (*rows, *scales, jnp.full(1, options["epsilon"], jnp.float32))
    of_x, *found = host.kernel_call(gradient_name(norm), build, results, *operands)
    # Each gradient is followed by the sums of the parts, which only the kernel reads.
    gradients = {name: found[2 * number].astype(arrays[name].dtype) for number, name in enumerate(names)}
    return {"x": of_x.reshape(x.shape), "residual": of_x.reshape(x.shape)} | gradients


JIT_X86 = OpImplementation(
    op="norm",
    name="jit_x86",
    forward=_norm,
    backward=_backward,
    platforms=("cpu",),
    supports=_supports,
    is_opaque=True,
    exports=False,
    priority=2,
)
