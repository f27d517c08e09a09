"""Runs what writes a function of vectors in LLVM IR."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from stack_kernels.llvm.code import FLOAT, INDEX, POINTER, Code, vector
from stack_kernels.llvm.host import Processor, kernel_call


def _module(function: Callable[[Code, Any], Any], processor: Processor) -> ir.Module:
    """A kernel that applies a function to each vector of its argument."""
    module = ir.Module("vectors")
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (count,) = code.buffer(code.parameters[0], 0, 1)
    code.close(code.over(count, processor.lanes))
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, tile = code.parameters
    x, y = (code.buffer(buffers, 0, 0)[0] for buffers in (arguments, results))
    place = code.times(tile, 4 * processor.lanes)
    code.store(function(code, code.load(vector(FLOAT, processor.lanes), code.at(x, place))), code.at(y, place))
    code.close()
    return module


def applied(name: str, function: Callable[[Code, Any], Any], x: np.ndarray) -> np.ndarray:
    """`function`, of a vector of float32, of all of `x`; the name tells it from other kernels."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return np.asarray(kernel_call(f"test_{name}", functools.partial(_module, function), result, jnp.asarray(x)))
