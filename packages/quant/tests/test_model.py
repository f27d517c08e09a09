"""Functions of parameters, and callable pytrees."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_quant.errors import QuantError
from stack_quant.model import QuantizedModel, quantize_function, quantize_model, report
from stack_quant.qarray import dequantize
from stack_quant.rules import Rule

RULES = [Rule(path="kernel|embedding", weights="int8")]
X = jax.random.normal(jax.random.key(0), (4, 16))


def error(actual: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    kernel: Any
    inner: Any = None
    scale: float = dataclasses.field(metadata={"static": True}, default=2.0)

    def __call__(self, x: Any) -> Any:
        return self.scaled(x @ self.kernel)

    def scaled(self, x: Any) -> Any:
        return x * self.scale

    @property
    def norm(self) -> Any:
        return jnp.linalg.norm(self.kernel)


def test_a_callable_pytree_keeps_its_methods() -> None:
    net = Net(jax.random.normal(jax.random.key(1), (16, 8)))
    quantized = quantize_model(net, RULES, X)
    call = jax.jit(lambda model, x: model(x))
    assert 0 < error(call(quantized, X), net(X)) < 0.02
    np.testing.assert_allclose(quantized.scaled(X), 2 * X)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        quantized.missing()  # pyrefly: ignore


def test_a_callable_pytree_keeps_its_submodules_its_properties_and_pickles() -> None:
    net = Net(jnp.eye(16), Net(jax.random.normal(jax.random.key(1), (16, 8))))
    quantized = quantize_model(net, RULES, X, call=lambda net, x: net.inner(net(x)))
    assert 0 < error(quantized.inner(X), net.inner(X)) < 0.02
    assert error(quantized.norm, net.norm) < 0.02 and quantized.scale == 2.0
    again = pickle.loads(pickle.dumps(quantized))
    np.testing.assert_array_equal(again(X), quantized(X))


def test_a_callable_pytree_that_was_trained_is_quantized_as_it_was() -> None:
    trained = quantize_model(jax.tree_util.Partial(jnp.matmul, X.T), Rule(path=".*", weights="int8"), X, method="qat")
    quantized = quantize_model(trained, Rule(path=".*", weights="int8"), X)
    np.testing.assert_allclose(quantized(X), trained(X), rtol=1e-4, atol=1e-5)
    (row,) = report(quantized).parameters
    assert (row.scheme, report(quantized).method) == ("int8", "ptq")


def product(params: Any, x: Any) -> Any:
    return x @ params["kernel"]


def test_a_function_with_its_parameters_is_a_model_like_any_other() -> None:
    params = {"kernel": jax.random.normal(jax.random.key(1), (16, 8))}
    quantized, of_pytree = quantize_function(product, params, RULES, (X,)), quantize_model(Net(X.T), RULES, X)
    assert isinstance(quantized, QuantizedModel) and isinstance(of_pytree, QuantizedModel)
    assert report(quantized).bytes_after < report(quantized).bytes_before
    assert repr(report(quantized)).startswith("<Report of ptq: 1 of 1 parameters quantized, 512 bytes before")
    assert "<td>kernel</td><td>[16, 8]</td><td>int8</td>" in report(quantized)._repr_html_()
    found = jax.jit(lambda model, x: model(x))(quantized, X)
    np.testing.assert_array_equal(found, jax.jit(quantized.apply)(quantized.params, X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(quantized))(X), quantized(X))
    trained = quantize_function(quantized, params, RULES, (X,), method="qat")
    assert trained.function is product and report(trained).method == "qat"
    of_model = jax.grad(lambda model: jnp.sum(model(X)))(trained).params
    of_params = jax.grad(lambda params: jnp.sum(trained.apply(params, X)))(params)
    np.testing.assert_array_equal(of_model["kernel"], of_params["kernel"])


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(QuantError, match=r"neither an nnx\.Module nor a callable pytree"):
        quantize_model({"kernel": X}, RULES, X)
    with pytest.raises(QuantError, match=r"neither an .* pytree with parameters"):
        quantize_model(lambda x: x, RULES, X)


def test_values_that_are_not_finite_are_named_by_path() -> None:
    with pytest.raises(ArgumentError, match=r"mlp/kernel holds 1 NaN"):
        params = {"mlp": {"kernel": jnp.ones((16, 4)).at[2, 1].set(jnp.nan)}}
        quantize_function(lambda p, x: x @ p["mlp"]["kernel"], params, RULES, (X,))


def test_shapes_are_enough() -> None:
    shape = jax.ShapeDtypeStruct((16, 8), "float32")
    fn = lambda p, x: x @ p["kernel"]
    planned = quantize_function(fn, {"kernel": shape}, RULES, (jax.ShapeDtypeStruct((2, 16), "float32"),))
    assert planned.params["kernel"].shape == (16, 8)
    assert report(planned).bytes_after == 16 * 8 + 4 * 8


def test_what_was_planned_from_shapes_is_quantized_part_by_part() -> None:
    keys = jax.random.split(jax.random.key(3))
    params = {"up": {"kernel": jax.random.normal(keys[0], (16, 8)), "bias": jnp.ones(8)}, "down": jnp.ones((8, 4))}
    fn = lambda p, x: (x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]
    rules = [Rule(path="up", weights="int4", tile_size=4), Rule(path="down", weights="int8")]
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), params)
    planned = quantize_function(fn, shapes, rules, (X,))
    whole = quantize_function(fn, params, rules, (X,))
    streamed = {path: planned.quantization.quantize(path, part) for path, part in params.items()}
    jax.tree.map(np.testing.assert_array_equal, streamed, whole.params)
    np.testing.assert_array_equal(planned.apply(streamed, X), planned.apply(whole.params, X))
    with pytest.raises(ShapeError, match=r"down: an array of shape \[4, 8\], .* planned with \[8, 4\]"):
        planned.quantization.quantize("down", jnp.ones((4, 8)))
    with pytest.raises(UnknownName, match=r"'up/kernal'.* 'up/kernel'"):
        planned.quantization.quantize("up/kernal", jnp.ones((16, 8)))


def test_quantized_parameters_are_quantized_again() -> None:
    params = {
        "kernel": jax.random.normal(jax.random.key(3), (16, 8)),
        "table": jax.random.normal(jax.random.key(4), (8, 8)),
    }
    fn = lambda p, x: x @ p["kernel"] @ p["table"]
    first = quantize_function(fn, params, Rule(path=".*", weights="int8", tile_size=8), (X,))
    rules = [Rule(path="kernel", weights="nf4", tile_size=4, double_quantized=True)]
    again, expected = (
        quantize_function(fn, given, rules, (X,))
        for given in (first.params, {path: dequantize(array) for path, array in first.params.items()})
    )
    jax.tree.map(np.testing.assert_array_equal, again.params, expected.params)
    assert again.params["kernel"].type == "nf4" and isinstance(again.params["table"], jax.Array)
    assert report(again).bytes_before == sum(array.nbytes for array in first.params.values())
    shapes = quantize_function(fn, jax.eval_shape(lambda: first.params), rules, (X,)).params
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, again.params)
    trained = quantize_function(fn, first.params, rules, (X,), method="qat").params
    np.testing.assert_array_equal(trained["kernel"], dequantize(first.params["kernel"]))


def test_half_precision_of_little_spread_survives() -> None:
    w = (0.01 * jax.random.normal(jax.random.key(2), (64, 32))).astype(jnp.float16)
    fn = lambda p, x: x @ p["kernel"]
    eye = jnp.eye(64, dtype=jnp.float16)
    quantized = quantize_function(fn, {"kernel": w}, RULES, (eye,))
    assert error(quantized(eye).astype(jnp.float32), w.astype(jnp.float32)) <= 0.0075


def test_on_eight_devices() -> None:
    script = Path(__file__).with_name("model_on_eight_devices.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
