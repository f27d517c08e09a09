"""Outer steps: the way of several updates is the gradient of a step with momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stack_core.abi.errors import ConfigError
from stack_train.optim import OuterConfig, ScheduleFreeConfig
from stack_train.optim.outer import take_outer_steps


def run(transformation, gradients):
    """Returns the parameters after each update, from 0."""
    params = {"w": jnp.zeros(2)}
    state, seen = transformation.init(params), []
    step = jax.jit(transformation.update)
    with jax.numpy_dtype_promotion("standard"):
        for size in gradients:
            found, state = step({"w": jnp.full(2, size)}, state, params)
            params = optax.apply_updates(params, found)
            seen.append(float(params["w"][0]))
    return seen


def test_outer_steps_are_those_of_nesterov_momentum_on_the_sum_of_updates():
    outer = OuterConfig(every_steps=2, learning_rate=0.5, momentum=0.9)
    sizes = [1.0, 2.0, -1.0, 4.0, 0.5]
    anchor = momentum = 0.0
    expected, param = [], 0.0
    for number, size in enumerate(sizes, start=1):
        param -= size
        if number % 2 == 0:
            gradient = anchor - param
            momentum = 0.9 * momentum + gradient
            param = anchor = anchor - 0.5 * (0.9 * momentum + gradient)
        expected.append(param)
    np.testing.assert_allclose(run(take_outer_steps(optax.sgd(1.0), outer), sizes), expected, rtol=1e-6)
    # Optax's step with Nesterov momentum, for the gradient of two updates.
    alone = run(optax.sgd(0.5, momentum=0.9, nesterov=True), [3.0])
    assert expected[1] == pytest.approx(alone[0])


def test_without_momentum_a_full_outer_step_changes_nothing():
    inner, outer = optax.adam(0.1), OuterConfig(every_steps=3, learning_rate=1.0, momentum=0.0)
    sizes = [1.0, -2.0, 0.5, 3.0, 1.0, 1.0]
    np.testing.assert_allclose(run(take_outer_steps(inner, outer), sizes), run(inner, sizes), rtol=1e-6)


def test_parameters_in_bfloat16_keep_their_dtype_and_a_float32_anchor():
    transformation = take_outer_steps(optax.sgd(1.0), OuterConfig(every_steps=1))
    params = {"w": jnp.zeros(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        updates, state = transformation.update({"w": jnp.ones(2, jnp.bfloat16)}, transformation.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    assert state.anchor["w"].dtype == state.momentum["w"].dtype == jnp.float32


def test_schedule_free_refuses_them():
    with pytest.raises(ConfigError, match=r"optimizer\.outer: schedule_free .* Leave it out"):
        ScheduleFreeConfig(outer=OuterConfig())
