"""The moving average follows the parameters and stands in their place when they are evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stack_train.optim import ScheduleConfig, ScheduleFreeConfig, SgdConfig
from stack_train.optim.averaging import average_weights

AXES = {"w": (None, None)}


def trained(config, steps):
    """All parameters that `steps` updates by a gradient of 1 lead to, and those to evaluate."""
    transformation = config.build(100, AXES)
    params = {"w": jnp.zeros((2, 2), jnp.bfloat16 if config.name == "sgd" else jnp.float32)}
    state, seen = transformation.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            updates, state = transformation.update(jax.tree.map(jnp.ones_like, params), state, params)
            params = jax.tree.map(lambda param, update: (param + update).astype(param.dtype), params, updates)
            seen.append(np.asarray(params["w"], np.float32)[0, 0])
        return np.array(seen), config.evaluation_params(params, state)["w"]


def test_the_average_weighs_early_updates_more():
    config = SgdConfig(
        learning_rate=1.0, momentum=0.0, clip_norm=None, ema_decay=0.25, schedule=ScheduleConfig(decay="constant")
    )
    seen, evaluated = trained(config, 3)
    expected = 0.0
    for done, value in enumerate(seen, start=1):
        decay = min(0.25, (1 + done) / (10 + done))
        expected = decay * expected + (1 - decay) * value
    assert evaluated.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(evaluated, np.float32), expected, rtol=1e-2)


def test_schedule_free_evaluates_the_mean_of_its_fast_weights():
    config = ScheduleFreeConfig(learning_rate=1e-2, weight_decay=0.0)
    seen, evaluated = trained(config, 4)
    # Adam's steps for a constant gradient are the learning rate long, and equally weighted: the mean of -1 .. -4.
    np.testing.assert_allclose(evaluated, -1e-2 * 2.5, rtol=1e-3)
    assert seen[-1] < float(evaluated[0, 0])


def test_extra_arguments_reach_the_wrapped_transformation():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda x: value * x, updates), state

    scaled = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    transformation = average_weights(scaled, 0.9)
    params = {"w": jnp.ones(2)}
    for chained in (transformation, optax.chain(optax.identity(), transformation)):
        updates, _ = chained.update(params, chained.init(params), params, value=3.0, unused=None)
        np.testing.assert_array_equal(updates["w"], [3.0, 3.0])
    # A transformation without extra arguments ignores them, as in `optax.chain`.
    plain = average_weights(optax.sgd(1.0), 0.9)
    plain.update(params, plain.init(params), params, value=3.0)
