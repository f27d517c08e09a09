import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from stack_kernels.llvm import vectors
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


def _applied(name: str, function: Callable[[Code, Any], Any], x: np.ndarray) -> np.ndarray:
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return np.asarray(kernel_call(f"test_{name}", functools.partial(_module, function), result, jnp.asarray(x)))


def test_exp_is_exact_to_two_units_in_the_last_place(processor: Processor) -> None:
    x = np.linspace(-87, 88, 2**16, dtype=np.float32)
    np.testing.assert_allclose(_applied("exp", vectors.exp, x), np.exp(x.astype(np.float64)), rtol=2.4e-7)


def test_exp_of_what_is_too_small_is_next_to_nothing(processor: Processor) -> None:
    found = _applied("exp", vectors.exp, np.full(16, -np.inf, np.float32))
    assert (found >= 0).all()
    assert (found < 2e-38).all()


def test_tanh_reaches_its_ends(processor: Processor) -> None:
    x = np.concatenate([np.linspace(-20, 20, 2**12 - 2, dtype=np.float32), [-np.inf, np.inf]]).astype(np.float32)
    found = _applied("tanh", vectors.tanh, x)
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), atol=3e-7)


@pytest.mark.parametrize("reduce", [vectors.total, vectors.largest])
def test_lanes_become_one_number(processor: Processor, reduce: Callable[[Code, Any], Any]) -> None:
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)

    def reduced(code: Code, values: Any) -> Any:
        return code.splat(reduce(code, values), processor.lanes)

    rows = x.reshape(-1, processor.lanes)
    expected = rows.sum(1) if reduce is vectors.total else rows.max(1)
    found = _applied(reduce.__name__, reduced, x).reshape(rows.shape)
    np.testing.assert_allclose(found, np.repeat(expected[:, None], processor.lanes, 1), rtol=1e-5)


def test_sums_of_several_vectors_come_in_their_order(processor: Processor) -> None:
    lanes = processor.lanes

    def sums(code: Code, values: Any) -> Any:
        return vectors.sums(code, [code.build.fmul(values, vectors.constant(factor, lanes)) for factor in range(lanes)])

    x = np.random.default_rng(0).normal(size=lanes).astype(np.float32)
    np.testing.assert_allclose(_applied("sums", sums, x), x.sum() * np.arange(lanes), rtol=1e-5, atol=1e-5)


def test_a_square_of_vectors_is_transposed(processor: Processor) -> None:
    x = np.arange(processor.lanes**2, dtype=np.float32)

    def first_column(code: Code, values: Any) -> Any:
        rows = [
            code.build.fadd(values, vectors.constant(1000 * row, processor.lanes)) for row in range(processor.lanes)
        ]
        return vectors.transposed(code, rows)[1]

    found = _applied("transposed", first_column, x).reshape(-1, processor.lanes)
    for row, start in zip(found, x[:: processor.lanes], strict=True):
        np.testing.assert_array_equal(row, start + 1 + 1000 * np.arange(processor.lanes))
