import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from stack_kernels.llvm.activations import ACTIVATIONS
from stack_kernels.llvm.code import FLOAT, INDEX, POINTER, Code, vector
from stack_kernels.llvm.host import Processor, kernel_call

_EXPECTED: dict[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


def _module(name: str, processor: Processor) -> ir.Module:
    """Values and slopes of a vector a tile."""
    module, kind = ir.Module(name), vector(FLOAT, processor.lanes)
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    _, (count,) = code.buffer(code.parameters[0], 0, 1)
    code.close(code.over(count, processor.lanes))
    code = Code(module, "tile", [POINTER, POINTER, INDEX])
    arguments, results, tile = code.parameters
    place = code.times(tile, 4 * processor.lanes)
    x = code.load(kind, code.at(code.buffer(arguments, 0, 0)[0], place))
    for number, found in enumerate(ACTIVATIONS[name](code, x)):
        code.store(found, code.at(code.buffer(results, number, 0)[0], place))
    code.close()
    return module


def test_every_activation_has_its_values() -> None:
    assert ACTIVATIONS.keys() == _EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(_EXPECTED))
def test_values_and_slopes_are_exact_and_keep_what_is_not_a_number(processor: Processor, name: str) -> None:
    x = jnp.asarray(np.concatenate([np.linspace(-30, 30, 2**10 - 4), [-0.0, np.inf, 90, np.nan]]), jnp.float32)
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2
    value, slope = kernel_call(f"test_{name}", functools.partial(_module, name), results, x)
    np.testing.assert_allclose(value, _EXPECTED[name](x), rtol=2e-6, atol=2e-6)
    with jax.enable_x64(True):
        exact = jax.vmap(jax.grad(_EXPECTED[name]))(x[:-3].astype(jnp.float64))
    np.testing.assert_allclose(slope[:-3], exact, rtol=2e-6, atol=2e-6)
