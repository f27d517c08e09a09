"""`rope` of many tokens on CPUs, in machine code."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi import OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_kernels.llvm import host
from stack_kernels.llvm.many_numbers import supports_many
from stack_kernels.rope.cpu import tables
from stack_kernels.rope.llvm_rows import Turn, turn_module

__all__ = ["LLVM"]


def _supports(call: OpCall, chip: Chip) -> bool | str:
    answer = supports_many(call, chip, call.arrays["x"].size)
    return "it turns halves, and not neighbours" if answer is True and call.options["interleaved"] else answer


def _turned(x: Any, cosine: Any, sine: Any) -> Any:
    turn = Turn(x.dtype.name)
    angles = [table.reshape(-1, table.shape[-1]).astype(jnp.float32) for table in (cosine, sine)]
    heads = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    result = jax.ShapeDtypeStruct(heads.shape, x.dtype)
    build = functools.partial(turn_module, turn)
    return host.kernel_call(turn.name, build, result, heads, *angles).reshape(x.shape)


def _rope(x: Any, positions: Any, *, interleaved: bool, **frequencies: Any) -> Any:
    return _turned(x, *tables(positions, **frequencies))


def _backward(arrays: Mapping[str, Any], options: Mapping[str, Any], output: Any, cotangent: Any) -> Mapping[str, Any]:
    """What turned is turned back."""
    frequencies = {name: option for name, option in options.items() if name != "interleaved"}
    cosine, sine = tables(arrays["positions"], **frequencies)
    return {"x": _turned(cotangent, cosine, -sine)}


LLVM = OpImplementation(op="rope", name="llvm", function=_rope, supports=_supports, vjp=_backward, priority=2)
