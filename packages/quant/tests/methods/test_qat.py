"""Quantization-aware training: float parameters, and products that are those of the quantized model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stack_core import ops
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.rules import Rule

from .conftest import error, floats, network

W8A8 = Rule(path=".*", weights="int8", activations="int8")


@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (Rule(path=".*", weights="int8"), 1e-4),
        (Rule(path="layers|head", weights="int4", tile_size=8, weight_calibration="rms,2"), 1e-4),
        pytest.param(Rule(path=".*", weights="int4", weight_calibration="minmax"), 1e-4, marks=pytest.mark.slow),
        (Rule(path=".*", weights="nf4"), 1e-4),
        # An activation in the middle between two codes goes either way: that of a later layer may be another.
        (W8A8, 0.005),
        (Rule(path="layers", op="linear", weights="int4", activations="int8"), 0.01),
    ],
)
def test_training_computes_what_the_quantized_model_will(params: Any, args: Any, rule: Rule, most: float) -> None:
    trained = quantize_function(network, params, [rule], args, method="qat")
    assert jax.tree.structure(trained.params) == jax.tree.structure(params)
    np.testing.assert_array_equal(trained.params["head"], params["head"])
    afterwards = quantize_function(network, params, [rule], args, method="ptq")
    result = jax.jit(trained.apply)(params, *args)
    assert error(result, jax.jit(afterwards.apply)(afterwards.params, *args)) <= most
    assert error(result, network(params, *args)) > most


def ragged(params: Any, x: Any) -> Any:
    return ops.ragged_dot(x, params.reshape(2, 16, 8), jnp.array([3, 5]))


PRODUCTS = {
    "matmul": lambda params, x: x @ params[:16],
    "weight on the left": lambda params, x: params[:16].T @ x.T,
    "batched": lambda params, x: jnp.einsum("nk,gko->gno", x, params.reshape(2, 16, 8)),
    "linear": lambda params, x: ops.linear(x, params[:16]),
    "gated": lambda params, x: ops.gated_linear_unit(x, params[:16], params[16:]),
    "ragged": ragged,
}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, ("int8", "int8")) for name in PRODUCTS),
        ("batched", ("int4", "int4")),
        ("gated", ("fp8_e4m3", "fp8_e5m2")),
        ("ragged", ("int4", "int4")),
    ],
)
def test_each_product_rounds_as_the_quantized_one(name: str, kinds: tuple[str, str]) -> None:
    fn = PRODUCTS[name]
    weight, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (32, 8)), (1, (8, 16))))
    rules = [Rule(path=".*", weights=kinds[0], activations=kinds[1])]
    trained = quantize_function(fn, weight, rules, (x,), method="qat")
    afterwards = quantize_function(fn, weight, rules, (x,), method="ptq")
    assert error(trained.apply(weight, x), afterwards(x)) <= 1e-4
    assert {row.computed for row in report(trained).operations} == {"rounded"}


def test_the_gradient_goes_straight_through_and_stops_where_values_were_clipped() -> None:
    weight = jnp.array([[0.3, -4.0], [1.0, 0.2], [-0.7, 3.0]])
    x = jnp.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 4.0]])
    rule = Rule(
        path="w", weights="int4", activations="int8", weight_calibration="fixed,2", activation_calibration="fixed,3"
    )
    fn = lambda params, x: x @ params["w"]
    trained = quantize_function(fn, {"w": weight}, [rule], (x,), method="qat")
    cotangent = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    _, pull = jax.vjp(trained.apply, {"w": weight}, x)
    to_weight, to_x = pull(cotangent)
    codes = quantize_function(fn, {"w": weight}, [rule], (x,), method="ptq")
    rounded_x = jnp.clip(jnp.round(x / (3 / 127)), -127, 127) * (3 / 127)
    np.testing.assert_allclose(
        to_weight["w"], jnp.where(jnp.abs(weight) <= 2, rounded_x.T @ cotangent, 0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        to_x, jnp.where(jnp.abs(x) <= 3, cotangent @ floats(codes.params)["w"].T, 0), rtol=1e-5, atol=1e-6
    )


def test_a_module_keeps_float_parameters_under_the_same_paths_and_learns() -> None:
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    x = jax.random.normal(jax.random.key(0), (32, 8))
    target = jnp.sin(x[:, :4])
    rules = [Rule(path="kernel", weights="int2", activations="int8")]
    trained = quantize_model(model, rules, x, method="qat")
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert [path for path, _ in nnx.to_flat_state(nnx.state(trained, nnx.Param))] == paths

    def loss(model: Any) -> Any:
        return jnp.mean((model(x) - target) ** 2)

    optimizer = optax.adam(1e-2)
    graph, params = nnx.split(trained)
    start = loss(trained)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.grad(lambda params: loss(nnx.merge(graph, params)))(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(40):
        params, state = step(params, state)
    nnx.update(model, params)
    quantized = quantize_model(model, rules, x, method="ptq")
    assert loss(quantized) < 0.7 * start
    assert error(quantized(x), nnx.merge(graph, params)(x)) <= 1e-4


def test_the_report_says_what_is_rounded(params: Any, args: Any) -> None:
    quantized = quantize_function(
        network, params, [Rule(path="head", weights="int8", activations="int8")], args, method="qat"
    )
    row = next(row for row in report(quantized).parameters if row.path == "head")
    assert (row.scheme, row.scale_shape, row.bytes_before) == ("float32 as int8", None, row.bytes_after)
    (product,) = (row for row in report(quantized).operations if row.paths == ("head",))
    assert (product.operands, product.computed, product.reason) == (("int8", "int8"), "rounded", "")
    assert {row.computed for row in report(quantized).operations if row.paths != ("head",)} == {"float"}


def test_gradients_are_not_quantized() -> None:
    rule = Rule(path=".*", weights="int8", gradients="int8")
    with pytest.raises(RuleError, match="method 'qat' has no gradients to quantize"):
        quantize_function(lambda p, x: x @ p, jnp.ones((4, 4)), [rule], (jnp.ones((2, 4)),), method="qat")


def test_shapes_are_enough() -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    trained = quantize_model(model, [W8A8], jax.ShapeDtypeStruct((2, 8), "float32"), method="qat")
    assert report(trained).parameters and isinstance(trained.kernel.get_value(), jax.ShapeDtypeStruct)
