"""Runs what writes a function of vectors in LLVM IR."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INDEX, POINTER, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor, kernel_call


def _module(function: Callable[[Builder, Any], Any], processor: Processor) -> ir.Module:
    """A kernel that applies a function to each vector of its argument."""
    module = ir.Module("vectors")
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    _, (count,) = builder.buffer(builder.parameters[0], 0, 1)
    builder.close(builder.over(count, processor.lanes))
    builder = Builder(module, "tile", TILE)
    arguments, results, tile, _ = builder.parameters
    x, y = (builder.buffer(buffers, 0, 0)[0] for buffers in (arguments, results))
    place = builder.times(tile, 4 * processor.lanes)
    builder.store(
        function(builder, builder.load(vector(FLOAT, processor.lanes), builder.at(x, place))), builder.at(y, place)
    )
    builder.close()
    return module


def applied(name: str, function: Callable[[Builder, Any], Any], x: np.ndarray) -> np.ndarray:
    """`function`, of a vector of float32, of all of `x`; the name tells it from other kernels."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return np.asarray(kernel_call(f"test_{name}", functools.partial(_module, function), result, jnp.asarray(x)))
