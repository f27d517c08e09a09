from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_serve.llm.unstacking import Layers, layer_by_layer, loops_over, split_layers

LAYERS = 3


def model(params: Any, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop over layers with parameters and a state, a constant of the loop, and something stacked besides."""

    def layer(x: jax.Array, per_layer: Any) -> tuple[jax.Array, jax.Array]:
        weights, held = per_layer
        return jnp.tanh(x @ weights["kernel"] + weights["bias"] + params["shift"]), held + x.sum()

    x, state = jax.lax.scan(layer, x + params["positions"].sum(axis=0), (params["layers"], state))
    return x, state


@pytest.fixture
def arguments() -> tuple[Any, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "layers": {
            "kernel": jax.random.normal(keys[0], (LAYERS, 4, 4)),
            "bias": jax.random.normal(keys[1], (LAYERS, 4)),
        },
        "shift": jax.random.normal(keys[2], (4,)),
        "positions": jax.random.normal(keys[3], (LAYERS, 4)),
    }
    return params, jax.random.normal(keys[4], (2, 4)), jnp.arange(3.0)


def test_only_what_loops_alone_use_is_theirs(arguments: tuple[Any, ...]) -> None:
    found, (x, state) = loops_over(model, *arguments)
    assert (x.shape, state.shape) == ((2, 4), (3,))
    assert found == {"layers": {"kernel": True, "bias": True}, "shift": False, "positions": False}


def test_calls_are_looked_into(arguments: tuple[Any, ...]) -> None:
    found, _ = loops_over(jax.jit(model), *arguments)
    assert found["layers"] == {"kernel": True, "bias": True} and not found["positions"]


def test_what_a_loop_and_something_else_use_is_not_the_loops(arguments: tuple[Any, ...]) -> None:
    def also_summed(params: Any, x: jax.Array, state: jax.Array) -> Any:
        return model(params, x, state)[0] + params["layers"]["bias"].sum()

    assert loops_over(also_summed, *arguments)[0]["layers"] == {"kernel": True, "bias": False}


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["plain", "in a call"])
def test_layer_by_layer_it_computes_the_same(arguments: tuple[Any, ...], wrap: Any) -> None:
    params, x, state = arguments
    split = split_layers(params, loops_over(model, *arguments)[0])
    split_state = split_layers(state, True)
    expected, expected_state = model(*arguments)
    found, found_state = jax.jit(layer_by_layer(wrap(model)))(split, x, split_state)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert isinstance(found_state, Layers)
    np.testing.assert_allclose(jnp.stack(found_state.arrays), expected_state, rtol=1e-5)


def test_no_loop_is_left(arguments: tuple[Any, ...]) -> None:
    params, x, state = arguments
    split = split_layers(params, loops_over(model, *arguments)[0])
    jaxpr = jax.make_jaxpr(layer_by_layer(model))(split, x, split_layers(state, True))
    assert "scan" not in str(jaxpr) and "concatenate" not in str(jaxpr)


def test_a_reversed_loop_runs_backwards() -> None:
    def alternating(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda carry, x: (carry * 2 + x, carry), jnp.float32(0), xs, reverse=True)

    xs = jnp.arange(1.0, 5.0)
    expected, stacked = alternating(xs)
    found, layers = layer_by_layer(alternating)(split_layers(xs, True))
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(jnp.stack(layers.arrays), stacked)


def test_layers_that_something_else_uses_are_stacked() -> None:
    xs = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(layer_by_layer(lambda xs: xs.sum(axis=0))(split_layers(xs, True)), xs.sum(axis=0))


def test_constants_of_a_loop_are_not_split() -> None:
    def constant(table: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda index, x: x + table[index], x)

    assert not loops_over(constant, jnp.ones((2, 3)), jnp.ones(3))[0]
