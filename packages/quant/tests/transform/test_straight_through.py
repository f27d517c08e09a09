"""Gradients through products of quantized activations: the gradients of the float products with the rounded weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from stack_core import ops
from stack_quant.lora.function import adapt_function
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

from .conftest import floats


def attended(params: Any, x: Any) -> Any:
    heads = (x @ params["w"]).reshape(1, 8, 2, 8)
    return ops.attention(heads, heads, heads)


def convolved(params: Any, x: Any) -> Any:
    kernel = params["w"].reshape(2, 2, 4, 16)
    return lax.conv_general_dilated(x.reshape(2, 4, 4, 4), kernel, (1, 1), "VALID", dimension_numbers=NUMBERS)


def gated(params: Any, x: Any) -> Any:
    return ops.gated_linear_unit(x, params["w"][:, :8], params["w"][:, 8:])


NUMBERS = ("NHWC", "HWIO", "NHWC")
PRODUCTS = {
    "product": lambda params, x: x @ params["w"],
    "weight on the left": lambda params, x: params["w"].T @ x.T,
    "batched": lambda params, x: jnp.einsum("nk,gko->gno", x, params["w"].reshape(2, 16, 8)[:, :16]),
    "linear": lambda params, x: ops.linear(x, params["w"], bias=jnp.ones(16)),
    "mapped": lambda params, x: jax.vmap(lambda row: ops.linear(row, params["w"]))(x),
    "convolution": convolved,
    "ragged": lambda params, x: ops.ragged_dot(x, params["w"].reshape(2, 16, 8), jnp.array([3, 5])),
    "scan": lambda params, x: (
        lax.scan(
            jax.checkpoint(lambda x, w: (x @ w, None)), x, jnp.stack([jnp.eye(16)] * 2) * 0.5 + 0 * params["w"][0, 0]
        )[0]
        @ params["w"]
    ),
}


def cosine(one: Any, other: Any) -> float:
    return float(jnp.vdot(one, other) / jnp.linalg.norm(one) / jnp.linalg.norm(other))


@pytest.mark.covering
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_those_of_the_float_product(name: str, static: bool) -> None:
    fn = PRODUCTS[name]
    weight, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (16, 16)), (1, (8, 16))))
    kinds = ("fp8_e4m3", "fp8_e4m3") if name == "linear" else ("int4", "int8")
    rule = Rule(path="w", weights=kinds[0], activations=kinds[1], static_ranges=static)
    quantized = quantize_function(fn, {"w": weight}, rule, (x,), stream=[(x,)] if static else None)
    result, pull = jax.vjp(jax.jit(quantized), x)
    expected, float_pull = jax.vjp(lambda x: fn(floats(quantized.params), x), x)
    assert 0 < jnp.linalg.norm(result - expected) < 0.05 * jnp.linalg.norm(expected)
    cotangent = jax.random.normal(jax.random.key(2), result.shape)
    np.testing.assert_allclose(pull(cotangent)[0], float_pull(cotangent)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [attended, gated])
def test_products_that_are_no_linear_maps_are_differentiated_at_the_rounded_values(fn: Any) -> None:
    weight, x = (jax.random.normal(jax.random.key(seed), shape) / 4 for seed, shape in ((0, (16, 16)), (1, (8, 16))))
    rules = [
        Rule(path="w", weights="int8", activations="int8"),
        Rule(op="attention", activations="int8", optional=True),
    ]
    quantized = quantize_function(fn, {"w": weight}, rules, (x,))
    found = jax.grad(lambda x: jnp.sum(jnp.sin(quantized(x))))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(fn(floats(quantized.params), x))))(x)
    assert cosine(found, expected) > 0.999


def test_no_gradient_reaches_what_a_static_range_clips() -> None:
    weight, x = jax.random.normal(jax.random.key(0), (16, 4)), jax.random.normal(jax.random.key(1), (8, 16))
    rule = Rule(path="w", weights="int8", activations="int8", static_ranges=True)
    quantized = quantize_function(lambda p, x: x @ p["w"], {"w": weight}, rule, (x,), stream=[(x / 2,)])
    found = jax.grad(lambda x: quantized(x).sum())(x)
    inside = jnp.abs(x) <= jnp.abs(x).max() / 2
    assert 0 < inside.mean() < 1
    expected = jnp.where(inside, floats(quantized.params)["w"].sum(axis=1), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kinds", "static"),
    [
        (("int8", "int8"), True),
        pytest.param(("int4", "int8"), False, marks=pytest.mark.slow),
        (("fp8_e4m3",) * 2, False),
    ],
)
def test_adapters_before_quantized_products_learn(kinds: tuple[str, str], static: bool) -> None:
    """The loss falls as it does on weights that alone are quantized."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (32, 32)) / 32**0.5 for name, key in zip("abc", keys[:3], strict=True)}
    x = jax.random.normal(keys[3], (64, 32))
    fn = lambda params, x: jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]
    target = jnp.sin(2 * x)

    def trained(activations: str | None) -> tuple[float, float]:
        rule = Rule(
            path=".*", weights=kinds[0], activations=activations, static_ranges=static and activations is not None
        )
        quantized = quantize_function(fn, params, rule, (x,), stream=[(x,)])
        adapted, factors = adapt_function(
            quantized, quantized.params, {"path": "a|b", "rank": 8}, (x,), key=jax.random.key(0)
        )
        optimizer = optax.adam(0.02)

        @jax.jit
        def step(factors: Any, state: Any) -> Any:
            loss, gradients = jax.value_and_grad(
                lambda factors: jnp.mean((adapted(factors, quantized.params, x) - target) ** 2)
            )(factors)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(gradients, state, factors)
                return loss, optax.apply_updates(factors, updates), state

        state, losses = optimizer.init(factors), []
        for _ in range(40):
            loss, factors, state = step(factors, state)
            losses.append(float(loss))
        return losses[0], losses[-1]

    (start, alone), (_, both) = trained(None), trained(kinds[1])
    assert alone < 0.7 * start and both < 1.1 * alone


def test_forward_programs_hold_no_float_product() -> None:
    weight, x = jnp.ones((16, 4)), jnp.ones((8, 16))
    quantized = quantize_function(lambda p, x: x @ p, weight, Rule(path=".*", weights="int8", activations="int8"), (x,))
    assert [row.computed for row in report(quantized).operations] == ["quantized"]
    lowered = jax.jit(quantized.apply).lower(quantized.params, x).compile().as_text()
    assert "dot" in lowered and not [line for line in lowered.splitlines() if " dot(" in line and "= f32" in line]
