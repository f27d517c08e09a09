from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.gated_linear_unit.jit_amx import JIT_AMX


@pytest.fixture(autouse=True)
def tiles() -> None:
    found = host.this_processor()
    if found is None or not found.has_tiles:
        pytest.skip("this processor has no AMX")


@pytest.mark.parametrize(
    "check", [check for check in op_checks("gated_linear_unit") if check.aspect == "bfloat16"], ids=str
)
def test_contract(check: OpCheck) -> None:
    check(JIT_AMX)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "relu_squared"])
@pytest.mark.parametrize("shape", [(9,), (2, 300)])
def test_values_and_gradients_are_those_of_the_reference(activation: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((*shape, 64), (64, 160), (64, 160))]

    def loss(implementation: Any, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        gated = ops.gated_linear_unit(*arrays, activation=activation, implementation=implementation)
        return jnp.sum(jnp.sin(gated.astype(jnp.float32) / 64)), gated

    (found, expected), (of_found, of_expected) = zip(
        *(
            jax.jit(lambda *arrays, how=how: _gated_and_gradients(loss, how, arrays))(*arrays)
            for how in (JIT_AMX, "reference")
        ),
        strict=True,
    )
    for one, other in zip((found, *of_found), (expected, *of_expected), strict=True):
        exact = np.asarray(other, np.float64)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=2.0**-7, atol=2.0**-9 * np.abs(exact).max())


def _gated_and_gradients(loss: Any, how: Any, arrays: Any) -> tuple[Any, Any]:
    gradients, gated = jax.grad(lambda arrays: loss(how, *arrays), has_aux=True)(arrays)
    return gated, gradients


def test_an_activation_that_it_does_not_compute_is_refused_with_those_that_it_does() -> None:
    x, weight = jnp.zeros((8, 32), jnp.bfloat16), jnp.zeros((32, 32), jnp.bfloat16)
    with pytest.raises(UnsupportedOp, match="gelu_tanh, relu, relu_squared, silu, and not sigmoid"):
        ops.gated_linear_unit(x, weight, weight, activation="sigmoid", implementation=JIT_AMX)
