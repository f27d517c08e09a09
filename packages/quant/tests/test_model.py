"""Functions of parameters, and callable pytrees."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.errors import ArgumentError
from stack_quant.errors import QuantError
from stack_quant.model import quantize_function, quantize_model
from stack_quant.rules import Rule

RULES = [Rule(path="kernel|embedding", weights="int8")]
X = jax.random.normal(jax.random.key(0), (4, 16))


def error(actual: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


def test_a_callable_pytree_keeps_its_methods() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Net:
        kernel: Any
        scale: float = dataclasses.field(metadata={"static": True}, default=2.0)

        def __call__(self, x: Any) -> Any:
            return self.scaled(x @ self.kernel)

        def scaled(self, x: Any) -> Any:
            return x * self.scale

    net = Net(jax.random.normal(jax.random.key(1), (16, 8)))
    quantized = quantize_model(net, RULES, X)
    call = jax.jit(lambda model, x: model(x))
    assert 0 < error(call(quantized, X), net(X)) < 0.02
    np.testing.assert_allclose(quantized.scaled(X), 2 * X)
    with pytest.raises(AttributeError, match="no method 'missing'"):
        quantized.missing()  # pyrefly: ignore


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(QuantError, match=r"neither an nnx\.Module nor a callable pytree"):
        quantize_model({"kernel": X}, RULES, X)


def test_values_that_are_not_finite_are_named_by_path() -> None:
    with pytest.raises(ArgumentError, match=r"mlp/kernel holds 1 NaN"):
        params = {"mlp": {"kernel": jnp.ones((16, 4)).at[2, 1].set(jnp.nan)}}
        quantize_function(lambda p, x: x @ p["mlp"]["kernel"], params, RULES, (X,))


def test_shapes_are_enough() -> None:
    shape = jax.ShapeDtypeStruct((16, 8), "float32")
    fn = lambda p, x: x @ p["kernel"]
    _, params, found = quantize_function(fn, {"kernel": shape}, RULES, (jax.ShapeDtypeStruct((2, 16), "float32"),))
    assert params["kernel"].shape == (16, 8)
    assert found.bytes_after == 16 * 8 + 4 * 8


def test_half_precision_of_little_spread_survives() -> None:
    w = (0.01 * jax.random.normal(jax.random.key(2), (64, 32))).astype(jnp.float16)
    fn = lambda p, x: x @ p["kernel"]
    eye = jnp.eye(64, dtype=jnp.float16)
    quantized, params, _ = quantize_function(fn, {"kernel": w}, RULES, (eye,))
    assert error(quantized(params, eye).astype(jnp.float32), w.astype(jnp.float32)) <= 0.0075


def test_on_eight_devices() -> None:
    script = Path(__file__).with_name("model_on_eight_devices.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
