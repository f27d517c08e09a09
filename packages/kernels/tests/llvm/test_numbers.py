import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from stack_kernels.llvm.code import FLOAT, INDEX, POINTER, Code, vector
from stack_kernels.llvm.host import Processor, kernel_call
from stack_kernels.llvm.numbers import BITS, WRITTEN, write


def _module(dtype: str, processor: Processor) -> ir.Module:
    """A kernel that writes float32 numbers as another dtype, all but the last under a mask."""
    module, lanes = ir.Module("write"), processor.lanes
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    code.close(INDEX(1))
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, _ = code.parameters
    x, (count,) = code.buffer(arguments, 0, 1)
    y, _ = code.buffer(results, 0, 0)
    whole = code.times(code.over(count, lanes), lanes)
    with code.loop(0, whole, lanes) as start:
        values = code.load(vector(FLOAT, lanes), code.at(x, code.times(start, 4)))
        write(code, dtype, values, code.at(y, code.times(start, BITS[dtype] // 8)), None)
    mask = code.mask(code.minus(count, whole), lanes)
    values = code.masked_load(vector(FLOAT, lanes), code.at(x, code.times(whole, 4)), mask)
    write(code, dtype, values, code.at(y, code.times(whole, BITS[dtype] // 8)), mask)
    code.close()
    return module


@pytest.mark.parametrize("dtype", WRITTEN)
def test_numbers_are_rounded_to_the_nearest_and_ties_to_even(processor: Processor, dtype: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 1000, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 65519, 65520], np.float32)
    x = np.concatenate([x, special, rng.normal(size=19).astype(np.float32)])
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0) | ~np.isfinite(x)]  # XLA's threads may take what is less for 0
    found: Any = kernel_call(
        f"test_write_{dtype}", functools.partial(_module, dtype), jax.ShapeDtypeStruct(x.shape, dtype), jnp.asarray(x)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(found, np.float64), x.astype(jnp.dtype(dtype)).astype(np.float64))
