import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.ops.building import gate_product
from stack_kernels.jit_cpu.gated_linear_unit.gate import gate_gradients
from stack_kernels.jit_cpu.host import Processor


@pytest.mark.covering
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "relu_squared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_are_those_of_the_reference(processor: Processor, dtype: str, activation: str) -> None:
    rng = np.random.default_rng(0)
    gate, up, cotangent = (jnp.asarray(rng.normal(size=(301, 127)), dtype) for _ in range(3))
    options = {"activation": activation, "limit": None, "up_offset": 0.0}
    expected = jax.vjp(lambda gate, up: gate_product(gate, up, **options), gate, up)[1](cotangent)
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for found, reference in zip(gate_gradients(activation, gate, up, cotangent), expected, strict=True):
        exact = np.asarray(reference, np.float64)
        np.testing.assert_allclose(
            np.asarray(found, np.float64), exact, rtol=rounding, atol=rounding * np.abs(exact).max()
        )
