"""`rope` of many tokens on CPUs, in machine code."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward, rope_angles
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.many_numbers import supports_many_rows
from stack_kernels.jit_cpu.rope.rows import Turn, turn_module

__all__ = ["JIT_X86"]


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    answer = supports_many_rows(call, chip, math.prod(call.arrays["x"].shape[:-2]))
    return "it turns halves, and not neighbours" if answer is True and call.options["interleaved"] else answer


def _tables(positions: Any, *, theta: float, scaling: Any, rotary_dim: int) -> tuple[Any, Any]:
    """Returns cosines and sines in fp32.

    XLA materializes the inputs of a foreign function, so each is computed once.
    """
    angles, factor = rope_angles(positions, theta=theta, scaling=scaling, rotary_dim=rotary_dim)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def _rotate(x: Any, cosine: Any, sine: Any) -> Any:
    turn = Turn(x.dtype.name)
    angles = [table.reshape(-1, table.shape[-1]).astype(jnp.float32) for table in (cosine, sine)]
    heads = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    result = jax.ShapeDtypeStruct(heads.shape, x.dtype)
    # The kernel reads all sizes from its buffers: one per dtype serves every model.
    build = functools.partial(turn_module, turn)
    return host.kernel_call(turn.name, build, result, heads, *angles).reshape(x.shape)


def _rope(
    x: Any, positions: Any, *, interleaved: bool, requested: Any, **frequencies: Any
) -> tuple[Any, dict[str, Any]]:
    return _rotate(x, *_tables(positions, **frequencies)), {}


@as_backward
def _backward(call: BackwardCall) -> Mapping[str, Any]:
    """Rotates back by the negative angles."""
    frequencies = {name: option for name, option in call.options.items() if name != "interleaved"}
    cosine, sine = _tables(call.arrays["positions"], **frequencies)
    # The transpose of a rotation; the factor is part of both tables.
    return {"x": _rotate(call.cotangents, cosine, -sine)}


JIT_X86 = OpImplementation(
    op="rope",
    name="jit_x86",
    forward=_rope,
    backward=_backward,
    platforms=("cpu",),
    supports=_supports,
    is_opaque=True,
    exports=False,
    priority=2,
)
