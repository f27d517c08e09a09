"""Consistency distillation: its loss beside the formula of its paper, its models in a step, its runs, its refusals."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stack_core.abi.config import apply_overrides, load_yaml, parse, to_yaml
from stack_core.abi.errors import ConfigError, UnknownName
from stack_core.abi.metrics import Metric
from stack_core.abi.objectives import Objective
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.commands.sample import sample
from stack_train.diffusion import dit
from stack_train.diffusion.consistency import ConsistencyDistillConfig
from stack_train.diffusion.noise import NoiseConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig
from stack_train.diffusion.samplers import SamplerConfig, levels_of
from stack_train.diffusion.sampling import open_run
from stack_train.objectives import CausalLMConfig
from stack_train.optim.adamw import AdamWConfig
from stack_train.run.config import RunConfig
from stack_train.run.resolve import parse_run
from stack_train.run.train import train
from stack_train.step.staged import check_stages
from stack_train.step.step import make_step
from stack_train.transform import UNCHANGED
from stack_train.variables.model_variables import stored_values

EXAMPLES = Path(__file__).parents[4] / "examples"
ROWS, NONE = 6, 10
NOISE = NoiseConfig(betas="scaled_linear", beta_start=0.00085, beta_end=0.012)


class Linear:
    """A denoiser a x + b c + t / 1000 of scalars a and b, with c the label, which stores its inputs."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __call__(self, images, timesteps, condition):
        labels, times = (x.reshape(-1, 1, 1, 1) for x in (condition["labels"], timesteps / 1000))
        self.inputs = [np.asarray(jax.lax.stop_gradient(x), np.float64) for x in (images, times, labels)]
        return self.a * images + self.b * labels.astype(jnp.float32) / 10 + times

    def unconditional(self, condition):
        return {"labels": jnp.full_like(condition["labels"], NONE)}


def predicted(params, x, times, labels):
    return params[0] * x + params[1] * labels / 10 + times


def ends(denoising, steps, timesteps, scaling):
    """alpha, sigma, c_skip, c_out and the previous timestep of LCM's algorithm 1, in float64."""
    if isinstance(denoising, FlowMatchingConfig):
        sigma = timesteps / 1000
        time = sigma / (denoising.shift - (denoising.shift - 1) * sigma)
        before = np.round(time * steps) / steps - 1 / steps
        before = denoising.shift * before / (1 + (denoising.shift - 1) * before) * 1000
        return 1 - sigma, sigma, 0.0, 1.0, before
    places = np.round(timesteps).astype(int)
    alpha, sigma = (each[places] for each in NOISE.alphas_and_sigmas())
    k = timesteps * scaling
    before = np.maximum(timesteps - NOISE.steps // steps, 0)
    return alpha, sigma, 0.25 / (k**2 + 0.25), k / np.sqrt(k**2 + 0.25), before


def clean_and_noise(prediction, x, said, alpha, sigma):
    """The image and the noise in x = alpha x0 + sigma e that a prediction stands for."""
    if prediction == "epsilon":
        return (x - sigma * said) / alpha, said
    if prediction == "v":
        return alpha * x - sigma * said, alpha * said + sigma * x
    return x - sigma * said, x + (1 - sigma) * said


def formula(objective, params, teacher, target, inputs, guidance):
    """The loss of Luo et al., algorithm 1, step by step as in diffusers' training script."""
    (x, times, labels), kind = inputs, objective.denoising.prediction
    settings = objective.denoising, objective.solver_steps
    alpha, sigma, skip, out, before = ends(*settings, times * 1000, objective.timestep_scaling)
    both = [
        clean_and_noise(kind, x, predicted(teacher, x, times, each), alpha, sigma)
        for each in (labels, np.full_like(labels, NONE))
    ]
    image, noise = (none + guidance * (given - none) for given, none in zip(*both, strict=True))
    next_alpha, next_sigma, next_skip, next_out, _ = ends(*settings, before, objective.timestep_scaling)
    x_before = next_alpha * image + next_sigma * noise
    said = predicted(target, x_before, before / 1000, labels)
    wanted = next_skip * x_before + next_out * clean_and_noise(kind, x_before, said, next_alpha, next_sigma)[0]
    found = skip * x + out * clean_and_noise(kind, x, predicted(params, x, times, labels), alpha, sigma)[0]
    squares = (found - wanted) ** 2
    c = objective.huber_scale
    losses = squares if objective.distance == "squared" else np.sqrt(squares + c**2) - c
    return losses[:-1].mean()


@pytest.mark.parametrize(
    "objective",
    [
        ConsistencyDistillConfig(denoising=FlowMatchingConfig(shift=2.0), solver_steps=3, guidance=3.0),
        ConsistencyDistillConfig(
            denoising=EpsilonConfig(noise=NOISE), solver_steps=4, guidance=2.0, timestep_scaling=0.01, huber_scale=0.3
        ),
        ConsistencyDistillConfig(
            denoising=VConfig(noise=NOISE, condition_dropout=0.5), guidance=1.5, max_guidance=4.0, distance="squared"
        ),
    ],
    ids=["flow", "epsilon", "v"],
)
def test_the_loss_is_that_of_the_paper_in_value_and_gradient(objective):
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.uniform(-1, 1, (ROWS, 3, 2, 1)), jnp.float32)
    # The last row fills the batch.
    batch = {"images": images, "labels": jnp.arange(ROWS), "weights": (jnp.arange(ROWS) < ROWS - 1).astype(jnp.float32)}
    teacher, target, key = (0.3, 0.1), (0.25, 0.2), jax.random.key(5)
    model, params = Linear(jnp.float32(0.7), jnp.float32(-0.1)), (0.7, -0.1)
    frozen = {"teacher": Linear(*map(jnp.float32, teacher)), "target": Linear(*map(jnp.float32, target))}
    value, metrics = objective(model, batch, key=key, **frozen)
    guidance = objective.guidance
    if objective.max_guidance is not None:  # its stream of the key is 3
        draws = jax.random.uniform(jax.random.fold_in(key, 3), (ROWS, 1, 1, 1))
        guidance = guidance + np.asarray(draws, np.float64) * (objective.max_guidance - guidance)
    arguments = (teacher, target, model.inputs, guidance)
    np.testing.assert_allclose(value, formula(objective, params, *arguments), rtol=2e-4)
    assert float(metrics["loss"].weight) == ROWS - 1
    # Images are noised to the levels of their timesteps.
    x, times, _ = model.inputs
    alpha, sigma, *_ = ends(objective.denoising, objective.solver_steps, times * 1000, objective.timestep_scaling)
    noise = (x - alpha * np.asarray(images, np.float64)) / sigma
    np.testing.assert_allclose(noise, jax.random.normal(jax.random.fold_in(key, 0), images.shape), atol=1e-3)

    def loss(params):
        return objective(Linear(*params), batch, key=key, **frozen)[0]

    gradient = jax.grad(loss)(tuple(map(jnp.float32, params)))
    slopes = [
        formula(objective, tuple(np.add(params, step)), *arguments)
        - formula(objective, tuple(np.subtract(params, step)), *arguments)
        for step in np.eye(2) * 1e-6
    ]
    np.testing.assert_allclose(gradient, np.array(slopes) / 2e-6, rtol=2e-3, atol=1e-5)
    assert all(
        not np.any(np.asarray(each))
        for name in frozen
        for each in jax.grad(
            lambda pair, name=name: objective(model, batch, key=key, **{**frozen, name: Linear(*pair)})[0]
        )(tuple(map(jnp.float32, teacher)))
    )


def test_loss_weights_multiply_the_losses_of_images():
    objective = ConsistencyDistillConfig(denoising=EpsilonConfig(noise=NOISE))
    images = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (ROWS, 3, 2, 1)), jnp.float32)
    batch = {"images": images, "labels": jnp.arange(ROWS), "weights": jnp.ones(ROWS)}
    model, key = Linear(jnp.float32(0.7), jnp.float32(-0.1)), jax.random.key(5)

    def loss(**weights):
        return float(objective(model, {**batch, **weights}, key=key, teacher=model, target=model)[0])

    parts = [loss(loss_weights=row) for row in jnp.eye(ROWS)]
    np.testing.assert_allclose(sum(parts), loss(), rtol=1e-5)
    factors = jnp.arange(ROWS, dtype=jnp.float32)
    np.testing.assert_allclose(loss(loss_weights=factors), np.dot(factors, parts), rtol=1e-5)


class Weight(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(3))


class ReportsAverage(Objective):
    """Follows the batch, and reports the weights by which it is called."""

    auxiliary_models = {"target": "average"}  # noqa: RUF012  never changed

    def __call__(self, model, batch, *, key, target):
        loss = jnp.mean((model.weight[...] - batch["x"]) ** 2)
        return loss, {"loss": Metric.mean(loss), "average": Metric.mean(jnp.mean(target.weight[...]))}


@pytest.mark.parametrize("decay", [0.5, None])
def test_the_target_has_the_average_of_the_optimizer_or_the_weights_themselves(decay):
    optimizer = AdamWConfig(learning_rate=0.1, weight_decay=0.0, ema_decay=decay)
    step = make_step(lambda key: Weight(), ReportsAverage(), replace(optimizer, clip_norm=None), steps=9)
    state, batch = step.init({}, key=jax.random.key(0)), {"x": jnp.zeros((2, 3))}
    assert state.auxiliary == {}
    for _ in range(3):
        expected = step.evaluation_variables(state)["weight"].mean()
        trained = state.params["weight"].mean()
        state, metrics = jax.jit(step)(state, batch)
        np.testing.assert_allclose(metrics["average"].value, expected, rtol=1e-6)
    assert (float(trained) == float(expected)) == (decay is None)
    np.testing.assert_allclose(
        step.evaluate(step.evaluation_variables(state), batch)["average"].value,
        step.evaluation_variables(state)["weight"].mean(),
        rtol=1e-6,
    )
    plain = make_step(lambda key: Weight(), ReportsAverage(), optax.sgd(0.1))
    assert plain.averaged == ("target",)


def test_stages_do_not_divide_the_average():
    objective = ConsistencyDistillConfig(denoising=FlowMatchingConfig())
    with pytest.raises(ConfigError, match="the objective's model target has the averaged weights of the trained model"):
        check_stages(objective, {}, UNCHANGED, ("target",))


TINY = ("model.layers=1", "model.heads=2", "model.head_dim=8", "data.batch_size=16", "data.validation_fraction=0")
SHORT = ("run.steps=2", "run.evaluate_every_steps=0", "optimizer.schedule.warmup_steps=0")


def config_of(name, *overrides):
    return parse_run(apply_overrides(load_yaml(EXAMPLES / name), [*SHORT, *overrides]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random teacher in place of the example's, and two updates of the example's student."""
    folder = tmp_path_factory.mktemp("lcm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        teacher = config_of("digits.yaml", *TINY, "optimizer.ema_decay=null")
        run = RunDirectory(folder / teacher.output)
        leaves = named_leaves(stored_values(dit.FAMILY.build(teacher.model, key=jax.random.key(0))))
        with CheckpointStore(run.checkpoints) as store:
            store.save_weights(leaves.items(), to_yaml(teacher))
        run.config.write_text(to_yaml(teacher))
        train(config_of("digits_lcm.yaml", *TINY[3:]))
        yield folder


def test_a_distilled_run_samples_four_steps_of_lcm_by_default(folder, monkeypatch):
    opened = open_run(folder / "runs/digits-lcm")
    assert opened.sampler == SamplerConfig(name="lcm", steps=4, solver_steps=20)
    assert opened.table(opened.sampler).rows[:, 0].tolist() == [1000.0, 750.0, 500.0, 250.0]
    assert open_run(folder / "runs/digits").sampler == SamplerConfig()
    monkeypatch.chdir(folder)
    sample("runs/digits-lcm", grid="1x10", out=folder / "default.png")
    sample("runs/digits-lcm", grid="1x10", out=folder / "four.png", sampler="lcm", steps=4)
    sample("runs/digits-lcm", grid="1x10", out=folder / "three.png", steps=3)
    files = [(folder / f"{name}.png").read_bytes() for name in ("default", "four", "three")]
    assert files[0] == files[1] != files[2]
    with pytest.raises(ConfigError, match=r"steps=21 is more than solver_steps=20, the timesteps that the model was"):
        sample("runs/digits-lcm", steps=21)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.init_from=null", *TINY], "objective.name='consistency_distill' distills the model that the run starts"),
        (["model.layers=2"], r"(?s)differs from runs/digits, .*model.layers: 2, not 1"),
        (["objective.denoising.times=uniform"], "objective.denoising.times would have no effect"),
    ],
)
def test_a_run_without_its_teacher_is_refused(folder, monkeypatch, overrides, message):
    monkeypatch.chdir(folder)
    start = {} if "run.init_from=null" in overrides else None
    with pytest.raises(ConfigError, match=message):
        mapping = apply_overrides(load_yaml(EXAMPLES / "digits_lcm.yaml"), [*SHORT, "output=runs/other", *overrides])
        if start is not None:
            mapping["model"] = {**load_yaml(EXAMPLES / "digits.yaml")["model"], **mapping.get("model", {})}
        train(parse_run(mapping))


FLOW = {"denoising": {"name": "flow_matching"}}


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({}, "denoising"),
        ({"denoising": {"name": "causal_lm"}}, "Unknown name 'causal_lm' among denoising objectives"),
        (FLOW | {"guidance": 3.0, "max_guidance": 2.0}, "max_guidance=2.0 is not above guidance=3.0"),
        (FLOW | {"timestep_scaling": 5.0}, "objective.timestep_scaling=5.0 would have no effect on a flow"),
        (FLOW | {"distance": "squared", "huber_scale": 0.1}, "objective.huber_scale would have no effect"),
        ({"denoising": {"name": "v", "min_snr": 5.0}}, "objective.denoising.min_snr would have no effect"),
        ({"denoising": {"name": "v"}, "solver_steps": 2000}, "solver_steps=2000 is more than the 1000 of the noise"),
        ({"denoising": {"name": "epsilon", "noise": {"zero_snr": True}}}, "the last timestep is pure noise"),
    ],
)
def test_settings_that_would_not_act_are_refused(objective, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        parse(
            RunConfig,
            {"output": "none", "model": {"name": "dit"}, "objective": {"name": "consistency_distill"} | objective},
        )


def test_an_objective_without_denoiser_and_data_without_condition_are_refused():
    with pytest.raises(ConfigError, match="which trains no denoiser"):
        ConsistencyDistillConfig(denoising=CausalLMConfig())
    objective = ConsistencyDistillConfig(denoising=FlowMatchingConfig(), guidance=2.0)
    batch = {"images": jnp.zeros((2, 4, 4, 1)), "weights": jnp.ones(2)}
    with pytest.raises(ConfigError, match="the data has no condition to be guided by"):
        objective(Linear(0.0, 0.0), batch, key=jax.random.key(0), teacher=None, target=None)


def test_four_steps_take_the_published_timesteps():
    levels = levels_of(NOISE, SamplerConfig(name="lcm", steps=4))
    assert levels.timesteps.tolist() == [999.0, 759.0, 499.0, 259.0]
