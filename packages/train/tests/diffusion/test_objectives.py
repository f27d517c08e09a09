"""Objectives: the error of a denoiser that knows the answer, weights, drawn times, dropped conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.noise import NoiseConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig

ROWS = 512
IMAGES = jnp.full((ROWS, 2, 2, 1), 0.5)
BATCH = {"images": IMAGES, "labels": jnp.arange(ROWS) % 10, "weights": jnp.ones(ROWS)}


class Oracle:
    """Knows that every image is 0.5 all over; says what `objective` wants, and keeps what it was called with."""

    def __init__(self, objective):
        self.objective = objective

    def __call__(self, images, timesteps, condition):
        self.timesteps, self.labels = np.asarray(timesteps), np.asarray(condition["labels"])
        if self.objective.prediction == "flow":
            sigma = (timesteps / 1000.0)[:, None, None, None]
            return (images - 0.5) / sigma
        alphas, sigmas = self.objective.schedule(4).alphas_and_sigmas()
        place = np.asarray(timesteps).astype(int)
        alpha, sigma = (jnp.asarray(a[place], jnp.float32)[:, None, None, None] for a in (alphas, sigmas))
        noise = (images - alpha * 0.5) / sigma
        return noise if self.objective.prediction == "epsilon" else alpha * noise - sigma * 0.5

    def unconditional(self, condition):
        return {"labels": jnp.full_like(condition["labels"], 10)}


OBJECTIVES = [FlowMatchingConfig(), FlowMatchingConfig(times="uniform", shift=3.0), EpsilonConfig(), VConfig()]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["flow", "flow_uniform", "epsilon", "v"])
def test_who_knows_the_image_has_no_loss_and_conditions_are_dropped_by_their_share(objective):
    oracle = Oracle(objective)
    loss, metrics = objective(oracle, BATCH, key=jax.random.key(0))
    assert float(loss) < 1e-4 and float(metrics["loss"].weight) == ROWS
    assert oracle.timesteps.min() >= 0.0 and oracle.timesteps.max() <= 1000.0 and oracle.timesteps.std() > 100
    kept = oracle.labels == np.asarray(BATCH["labels"])
    assert 0.05 < (~kept).mean() < 0.16 and (oracle.labels[~kept] == 10).all()


class Nothing:
    def __call__(self, images, timesteps, condition):
        self.timesteps = np.asarray(timesteps)
        return jnp.zeros_like(images)

    def unconditional(self, condition):
        return condition


def test_min_snr_weighs_the_error_of_the_noise_alike_for_both_predictions():
    model, key = Nothing(), jax.random.key(0)
    flat, weighed = (EpsilonConfig(min_snr=g)(model, BATCH, key=key)[0] for g in (None, 5.0))
    alphas, sigmas = NoiseConfig().alphas_and_sigmas()
    snr = (alphas / sigmas) ** 2
    assert float(weighed) == pytest.approx(float(flat) * np.mean(np.minimum(snr, 5) / snr), rel=0.15)
    snr = jnp.asarray([0.1, 1.0, 50.0])
    # As e = alpha v + sigma x, a squared error of v is (snr + 1) / snr times that of the noise it stands for.
    np.testing.assert_allclose(VConfig().weight(snr, 5.0) * (snr + 1.0), EpsilonConfig().weight(snr, 5.0) * snr)


def test_rows_of_padding_weigh_nothing():
    weights = jnp.zeros(ROWS).at[0].set(1.0)
    loss, metrics = EpsilonConfig()(Nothing(), {**BATCH, "weights": weights}, key=jax.random.key(0))
    assert float(metrics["loss"].weight) == 1.0
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), IMAGES.shape)
    assert float(loss) == pytest.approx(float(jnp.mean(noise[0] ** 2)), rel=1e-5)


def test_logit_normal_times_favour_the_middle_and_a_shift_moves_them_to_noise():
    def times(**settings):
        model = Nothing()
        FlowMatchingConfig(**settings)(model, BATCH, key=jax.random.key(0))
        return model.timesteps / 1000.0

    middle = [np.mean(np.abs(times(times=name) - 0.5) < 0.25) for name in ("uniform", "logit_normal")]
    assert middle[0] == pytest.approx(0.5, abs=0.07) and middle[1] == pytest.approx(0.73, abs=0.07)
    assert np.median(times(shift=3.0)) == pytest.approx(0.75, abs=0.05)


def test_betas_that_shrink_are_refused():
    with pytest.raises(ConfigError, match="must grow"):
        NoiseConfig(beta_start=0.5, beta_end=0.1)


@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "cosine"])
def test_schedules_end_in_noise(betas):
    alphas, sigmas = NoiseConfig(betas=betas).alphas_and_sigmas()
    assert (np.diff(alphas) < 0).all() and alphas[0] > 0.99 and alphas[-1] < 0.1
    np.testing.assert_allclose(alphas**2 + sigmas**2, 1.0)
