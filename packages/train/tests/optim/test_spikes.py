"""Updates with a spike in their gradients leave everything as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stack_train.optim import AdamWConfig, ScheduleConfig, SpikeConfig
from stack_train.optim.spikes import skip_spikes

AXES = {"w": (None, None)}


@pytest.fixture
def run():
    """Applies gradients of given sizes; returns parameters, skipped and learning rate after each."""
    config = AdamWConfig(
        learning_rate=0.1,
        schedule=ScheduleConfig(decay="linear", final_fraction=0.0),
        skip_spikes=SpikeConfig(window_steps=8, deviations=4.0, max_consecutive=2),
    )
    transformation = config.build(100, AXES)

    @jax.jit
    def step(params, state, size, number):
        updates, state = transformation.update({"w": size * jnp.ones((2, 2))}, state, params)
        return {"w": params["w"] + updates["w"]}, state, config.metrics(state, number, 100)

    def apply(sizes):
        params, found = {"w": jnp.ones((2, 2))}, []
        state = transformation.init(params)
        with jax.numpy_dtype_promotion("standard"):
            for number, size in enumerate(sizes):
                params, state, metrics = step(params, state, size, number)
                found.append((float(params["w"][0, 0]), float(metrics["skipped"]) > 0, float(metrics["learning_rate"])))
        return found

    return apply


ORDINARY = [1.0, 1.1, 0.9, 1.05]


def test_a_spike_is_skipped_and_training_goes_on_as_if_it_never_was(run):
    found = run([*ORDINARY, 50.0, 1.0])
    assert [skipped for _, skipped, _ in found] == [False] * 4 + [True, False]
    assert found[4][0] == found[3][0]
    assert found[5] == run([*ORDINARY, 1.0])[4]


def test_a_spike_is_applied_before_the_ordinary_is_known_and_where_it_lasts(run):
    assert [skipped for _, skipped, _ in run([1.0, 50.0, 1.0])] == [False] * 3
    lasting = [skipped for _, skipped, _ in run([*ORDINARY, 50.0, 52.0, 51.0, 50.0])]
    assert lasting[4] and not any(lasting[-2:])


def test_what_is_not_finite_is_skipped_but_not_for_ever(run):
    found = run([1.0, np.nan, np.inf, 1.0])
    assert [skipped for _, skipped, _ in found] == [False, True, True, False]
    assert np.isfinite(found[3][0])
    broken = run([1.0, np.nan, np.nan, np.nan])
    assert not broken[3][1] and np.isnan(broken[3][0])


def test_extra_arguments_reach_the_wrapped_transformation():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda x: value * x, updates), state

    scaled = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    transformation = skip_spikes(scaled, SpikeConfig())
    params = {"w": jnp.ones(2)}
    for chained in (transformation, optax.chain(optax.identity(), transformation)):
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = chained.update(params, chained.init(params), params, value=3.0, unused=None)
        np.testing.assert_array_equal(updates["w"], [3.0, 3.0])
    # A transformation without extra arguments ignores them, as in `optax.chain`.
    plain = skip_spikes(optax.sgd(1.0), SpikeConfig())
    with jax.numpy_dtype_promotion("standard"):
        plain.update(params, plain.init(params), params, value=3.0)
