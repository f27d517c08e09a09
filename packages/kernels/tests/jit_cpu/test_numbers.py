import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from stack_kernels.jit_cpu.builder import FLOAT, INDEX, POINTER, TILE, Builder, vector
from stack_kernels.jit_cpu.host import Processor, kernel_call
from stack_kernels.jit_cpu.numbers import BITS, WRITTEN, write


def _module(dtype: str, processor: Processor) -> ir.Module:
    """A kernel that writes float32 numbers as another dtype, all but the last under a mask."""
    module, lanes = ir.Module("write"), processor.lanes
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    builder.close(INDEX(1))
    builder = Builder(module, "tile", TILE)
    arguments, results, _, _ = builder.parameters
    x, (count,) = builder.buffer(arguments, 0, 1)
    y, _ = builder.buffer(results, 0, 0)
    whole = builder.times(builder.over(count, lanes), lanes)
    with builder.loop(0, whole, lanes) as start:
        values = builder.load(vector(FLOAT, lanes), builder.at(x, builder.times(start, 4)))
        write(builder, dtype, values, builder.at(y, builder.times(start, BITS[dtype] // 8)), None)
    mask = builder.mask(builder.minus(count, whole), lanes)
    values = builder.masked_load(vector(FLOAT, lanes), builder.at(x, builder.times(whole, 4)), mask)
    write(builder, dtype, values, builder.at(y, builder.times(whole, BITS[dtype] // 8)), mask)
    builder.close()
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
