"""The optimizer's schedule, clipping and decay mask do what their config says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.config import parse
from stack_core.errors import ConfigError
from stack_train.optim import AdamWConfig, ScheduleConfig, decayed_by_axes

STEPS = 100


@pytest.mark.parametrize(
    ("decay", "middle", "last"),
    [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)],
)
def test_schedules_warm_up_to_the_peak_and_decay_to_the_fraction(decay, middle, last):
    schedule = ScheduleConfig(warmup_steps=20, decay=decay, final_fraction=0.1).build(2.0, STEPS)
    rates = np.array([float(schedule(step)) for step in range(STEPS + 1)])
    assert rates[0] == pytest.approx(2.0 / 21)
    assert (np.diff(rates[:21]) > 0).all()
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(2.0 * middle)
    assert rates[100] == pytest.approx(2.0 * last)


def test_only_matrices_are_decayed():
    axes = {
        "kernel": ("layers", "embed", "mlp"),
        "norm": ("layers", "norm"),
        "bias": ("mlp",),
        "embedding": ("vocab", "embed"),
    }
    assert decayed_by_axes(axes) == {"kernel": True, "norm": False, "bias": False, "embedding": True}


def updates(gradient, parameter=1.0, **settings):
    config = AdamWConfig(learning_rate=0.1, schedule=ScheduleConfig(decay="constant"), **settings)
    transformation = config.build(STEPS, lambda params: {"w": True})
    params = {"w": jnp.full((2,), parameter)}
    with jax.numpy_dtype_promotion("standard"):
        update, _ = transformation.update({"w": jnp.array(gradient)}, transformation.init(params), params)
    return np.asarray(update["w"])


def test_the_first_adam_update_has_the_size_of_the_learning_rate():
    np.testing.assert_allclose(updates([3.0, -4.0], weight_decay=0.0), [-0.1, 0.1], rtol=1e-5)


def test_weight_decay_is_decoupled_from_the_gradient():
    np.testing.assert_allclose(updates([0.0, 0.0], weight_decay=0.5), [-0.05, -0.05], rtol=1e-5)


def test_clipping_acts_on_the_global_norm_and_can_be_off():
    clipped = updates([3.0, -4.0], clip_norm=1e-9, epsilon=1e-3, weight_decay=0.0)
    unclipped = updates([3.0, -4.0], clip_norm=None, epsilon=1e-3, weight_decay=0.0)
    assert (abs(clipped) < 1e-6).all()
    np.testing.assert_allclose(unclipped, [-0.1, 0.1], rtol=1e-3)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="beta1"):
        parse(AdamWConfig, {"beta1": 1.5})
    with pytest.raises(ConfigError, match="Did you mean 'warmup_steps'"):
        parse(AdamWConfig, {"schedule": {"warm_up_steps": 3}})
