"""Post-training of denoisers: the losses beside their papers' formulas, and what whole runs learn."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.abi.errors import ConfigError, UnknownName
from stack_rl.objectives.flow_grpo import FlowGRPOConfig
from stack_rl.objectives.image_preference import DiffusionDPOConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import open_run
from stack_train.objectives import CausalLMConfig
from stack_train.run.config import RunConfig
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

EXAMPLES = Path(__file__).parents[1] / "examples"
START = ("model.layers=2", "data.batch_size=32", "run.steps=700", "run.evaluate_every_steps=0")
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


def test_flow_grpo_is_the_loss_of_its_paper_in_value_and_gradient():
    """Equations 5 and 12 of Liu et al. in float64, with ratios inside and outside of the clip range."""
    objective = FlowGRPOConfig(denoising=FlowMatchingConfig(), clip_low=0.02, clip_high=0.05, kl=0.3)
    rng, rows, shape = np.random.default_rng(1), 40, (40, 3, 2, 1)
    coefficients = np.stack([rng.uniform(0.7, 1, rows), rng.uniform(-0.3, 0, rows), rng.uniform(0.2, 0.5, rows)], 1)
    arrays = {name: rng.normal(size=shape) for name in ("images", "velocities")}
    a, b, s = coefficients.T.reshape(3, rows, 1, 1, 1)
    arrays["next_images"] = a * arrays["images"] + b * arrays["velocities"] + s * rng.normal(size=shape)
    arrays |= {
        "coefficients": coefficients,
        "timesteps": rng.uniform(0, 1000, rows),
        "advantages": rng.normal(size=rows),
    }
    arrays |= {"rewards": rng.normal(size=rows), "weights": (np.arange(rows) < 38).astype(float)}
    batch = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()} | {"labels": jnp.arange(rows) % 3}
    batch["coefficients"] = batch["coefficients"].at[38:].set(0.0)  # as in rows that fill a batch
    labels, times = (np.arange(rows) % 3).reshape(-1, 1, 1, 1), arrays["timesteps"].reshape(-1, 1, 1, 1) / 1000
    reference = 0.3, 0.1

    def formula(scale, shift):
        mean, of_reference = (
            a * arrays["images"] + b * (x * arrays["images"] + y * labels + times)
            for x, y in ((scale, shift), reference)
        )
        old = a * arrays["images"] + b * arrays["velocities"]
        logs = [
            norm(each, np.broadcast_to(s, shape)).logpdf(arrays["next_images"]).mean((1, 2, 3)) for each in (mean, old)
        ]
        ratio, advantages = np.exp(logs[0] - logs[1]), arrays["advantages"]
        surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.98, 1.05) * advantages)
        kl = ((mean - of_reference) ** 2 / (2 * s**2)).mean((1, 2, 3))
        assert 0.2 < np.mean((ratio < 0.98) | (ratio > 1.05)) < 0.95
        return (0.3 * kl - surrogate)[:38].mean(), kl[:38].mean()

    def loss(params):
        frozen = Linear(*map(jnp.float32, reference))
        return objective(Linear(*params), batch, key=jax.random.key(0), reference=frozen)

    params = 0.2, 0.05
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(tuple(map(jnp.float32, params)))
    expected, kl = formula(*params)
    np.testing.assert_allclose([value, metrics["kl"].value], [expected, kl], rtol=1e-4)
    np.testing.assert_allclose(metrics["reward"].value, arrays["rewards"][:38].mean(), rtol=1e-4)
    (x, y), step = params, 1e-6
    slopes = [formula(x + step, y)[0] - formula(x - step, y)[0], formula(x, y + step)[0] - formula(x, y - step)[0]]
    np.testing.assert_allclose(gradient, np.array(slopes) / (2 * step), rtol=1e-3)


def test_advantages_are_of_a_group_and_bounded():
    objective = FlowGRPOConfig(denoising=FlowMatchingConfig(), max_advantage=1.2)
    found = objective.advantages(np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 9.0], [5.0, 5.0, 5.0]]))
    expected = [[-1.0, 0.0, 1.0], [-1 / np.sqrt(3), -1 / np.sqrt(3), 2 / np.sqrt(3)], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(found, np.clip(expected, -1.2, 1.2), atol=1e-5)
    assert (
        FlowGRPOConfig(denoising=FlowMatchingConfig(), max_advantage=0.5).advantages(np.array([[0.0, 9.0]])).max()
        == 0.5
    )


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"denoising": {"name": "causal_lm"}}, "Unknown name 'causal_lm' among denoising objectives"),
        ({"denoising": {"name": "flow_matching"}, "reference": "runs/a"}, "objective.reference is 'runs/a'. Choose"),
        ({}, "denoising"),
        ({"name": "flow_grpo", "denoising": {"name": "epsilon"}}, "Flow-GRPO samples flows by an SDE, which"),
        (
            {"name": "flow_grpo", "denoising": {"name": "flow_matching"}, "kl": 0, "reference": "run:a"},
            "objective.kl is 0, so objective.reference would have no effect",
        ),
        (
            {"name": "flow_grpo", "denoising": {"name": "flow_matching"}, "minibatches": 1, "clip_low": 0.1},
            "objective.clip_low would have no effect",
        ),
    ],
)
def test_an_objective_of_images_needs_a_denoising_objective(objective, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        parse(
            RunConfig, {"output": "none", "model": {"name": "dit"}, "objective": {"name": "diffusion_dpo"} | objective}
        )
    with pytest.raises(ConfigError, match="which trains no denoiser"):
        DiffusionDPOConfig(denoising=CausalLMConfig())


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Where examples find `runs/`: a small start, and its data."""
    folder = tmp_path_factory.mktemp("ink")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(EXAMPLES))
        subprocess.run([sys.executable, EXAMPLES / "ink.py"], check=True)
        run("digits.yaml", *START, "optimizer.schedule.warmup_steps=20", "optimizer.ema_decay=0.98")
        yield folder


def run(name, *overrides):
    return train(parse_run(apply_overrides(load_yaml(EXAMPLES / name), list(overrides))))


def brightness(run):
    """The mean brightness of 20 images of each label."""
    return open_run(Path(run)).images([*range(10)] * 20, SamplerConfig(steps=20)).mean((1, 2, 3))


@pytest.mark.slow
def test_preferences_for_brighter_digits_make_samples_brighter(start):
    summary = run("digits_dpo.yaml")
    before, after = brightness("runs/digits"), brightness("runs/digits-dpo")
    assert summary.validation_metrics["accuracy"] > 0.8
    assert np.mean(after > np.median(before)) > 0.9


@pytest.mark.slow
def test_flow_grpo_raises_its_reward(start):
    run("digits_grpo.yaml")
    records = map(json.loads, Path("runs/digits-grpo/metrics.jsonl").read_text().splitlines())
    rewards = [record["reward"] for record in records if record["kind"] == "evaluation"]
    before, after = brightness("runs/digits").mean() / 255, brightness("runs/digits-grpo").mean() / 255
    assert rewards[-1] > rewards[0] > 0.0 and rewards[-1] == pytest.approx(after, abs=0.05)
    assert after > before + 0.1
