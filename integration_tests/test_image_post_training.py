"""Post-training of denoisers: the losses beside their papers' formulas, and what whole runs learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, UnknownName
from stack_rl.objectives.image_preference import DiffusionDPOConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig
from stack_train.objectives import CausalLMConfig
from stack_train.run.config import RunConfig

ROWS = 5


class Linear:
    """A denoiser a x + b c + t / 1000 of scalars a and b, with c the label, which keeps what it was called with."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __call__(self, images, timesteps, condition):
        labels, times = (x.reshape(-1, 1, 1, 1) for x in (condition["labels"], timesteps / 1000))
        self.inputs = [np.asarray(jax.lax.stop_gradient(x), np.float64) for x in (images, times, labels)]
        return self.a * images + self.b * labels.astype(jnp.float32) + times

    def unconditional(self, condition):
        return {"labels": jnp.full_like(condition["labels"], 10)}


def pairs():
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (ROWS, 2, 3, 2, 1)).astype(np.float32)
    return {"images": jnp.asarray(images), "labels": jnp.arange(ROWS), "weights": jnp.array([1.0, 1.0, 1.0, 1.0, 0.0])}


def expected_dpo(denoising, batch, inputs, params, *, beta, smoothing):
    """The loss of Wallace et al., equation 14, in float64, from the noisy images that the denoiser was given."""
    x, times, labels = inputs
    clean = np.concatenate([batch["images"][:, 0], batch["images"][:, 1]], dtype=np.float64)
    if denoising.prediction == "flow":
        alpha, sigma = 1 - times, times
    else:
        places = np.round(times.ravel() * 1000).astype(int)
        alpha, sigma = (each[places].reshape(times.shape) for each in denoising.schedule(1).alphas_and_sigmas())
    noise = (x - alpha * clean) / sigma
    # Both images of a pair have one noise, one time and one condition.
    np.testing.assert_allclose(noise[:ROWS], noise[ROWS:], atol=2e-4)
    for each in (times, labels):
        np.testing.assert_array_equal(each[:ROWS], each[ROWS:])
    target = {"flow": noise - clean, "epsilon": noise, "v": alpha * noise - sigma * clean}[denoising.prediction]
    weight = np.ones(2 * ROWS)
    if getattr(denoising, "min_snr", None) is not None:
        snr = (alpha / sigma).ravel() ** 2
        weight = np.minimum(snr, denoising.min_snr) / (snr if denoising.prediction == "epsilon" else snr + 1)
    errors = [weight * ((target - a * x - b * labels - times) ** 2).mean((1, 2, 3)) for a, b in params]
    better = errors[1] - errors[0]
    margin = beta / 2 * (better[:ROWS] - better[ROWS:])
    losses = (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    return losses[:-1].mean(), margin[:-1]


DENOISING = [FlowMatchingConfig(shift=2.0), EpsilonConfig(), VConfig(min_snr=5.0, condition_dropout=0.5)]


@pytest.mark.parametrize("denoising", DENOISING, ids=["flow", "epsilon", "v"])
def test_diffusion_dpo_is_the_loss_of_its_paper_in_value_and_gradient(denoising):
    objective, batch = DiffusionDPOConfig(denoising=denoising, beta=7.0, label_smoothing=0.1), pairs()
    key, reference = jax.random.key(3), (jnp.float32(0.2), jnp.float32(0.05))

    def loss(params):
        return objective(Linear(*params), batch, key=key, reference=Linear(*reference))[0]

    params = jnp.float32(0.7), jnp.float32(-0.1)
    model, frozen = Linear(*params), Linear(*reference)
    value, metrics = objective(model, batch, key=key, reference=frozen)
    for ours, theirs in zip(model.inputs, frozen.inputs, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    def formula(*changed):
        both = np.float64([changed, reference])
        return expected_dpo(denoising, batch, model.inputs, both, beta=7.0, smoothing=0.1)

    mean, margin = formula(*map(float, params))
    np.testing.assert_allclose(value, mean, rtol=1e-4)
    np.testing.assert_allclose(metrics["margin"].value, margin.mean(), rtol=1e-3, atol=1e-4)
    assert float(metrics["accuracy"].value) == np.mean(margin > 0) and float(metrics["loss"].weight) == ROWS - 1
    a, b, step = *map(float, params), 1e-4
    slopes = [formula(a + step, b)[0] - formula(a - step, b)[0], formula(a, b + step)[0] - formula(a, b - step)[0]]
    np.testing.assert_allclose(jax.grad(loss)(params), np.array(slopes) / (2 * step), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"denoising": {"name": "causal_lm"}}, "Unknown name 'causal_lm' among denoising objectives"),
        ({"denoising": {"name": "flow_matching"}, "reference": "runs/a"}, "objective.reference is 'runs/a'. Choose"),
        ({}, "denoising"),
    ],
)
def test_an_objective_of_images_needs_a_denoising_objective(objective, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        parse(
            RunConfig, {"output": "none", "model": {"name": "dit"}, "objective": {"name": "diffusion_dpo"} | objective}
        )
    with pytest.raises(ConfigError, match="which trains no denoiser"):
        DiffusionDPOConfig(denoising=CausalLMConfig())
