from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.host import Processor

from .conftest import applied

_EXPECTED: dict[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


def test_every_activation_has_its_values() -> None:
    assert ACTIVATIONS.keys() == _EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(_EXPECTED))
def test_values_are_exact_and_keep_what_is_not_a_number(processor: Processor, name: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 2**10 - 6), [-0.0, np.inf, -np.inf, 90, -90, np.nan]]).astype(np.float32)
    found = applied(name, lambda code, x: ACTIVATIONS[name](code, x)[0], x)
    np.testing.assert_allclose(found, _EXPECTED[name](x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", sorted(_EXPECTED))
def test_slopes_are_exact(processor: Processor, name: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 2**10 - 3), [-0.0, -90, 90]]).astype(np.float32)
    found = applied(f"slope_of_{name}", lambda code, x: ACTIVATIONS[name](code, x)[1], x)
    with jax.enable_x64(True):
        exact = jax.vmap(jax.grad(_EXPECTED[name]))(jnp.asarray(x, jnp.float64))
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-6)
