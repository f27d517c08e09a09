"""The dtypes of training: float32 masters, sums and moments, whatever a checkpoint holds; bfloat16 on request."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.llama import LlamaConfig
from stack_train.nn.linear import lookup, take_rows
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, GroupConfig, ScheduleConfig
from stack_train.step.precision import Precision, apply_updates, widen, widen_optimizer
from stack_train.step.program import Program
from stack_train.step.step import make_step

BF16, F32 = jnp.bfloat16, jnp.float32
MODEL = LlamaConfig(vocab_size=29, layers=1, embed=16, heads=2, mlp=24, max_positions=16, param_dtype="bfloat16")
IN_BF16 = Precision(params="bfloat16")


def make_program(**changes):
    fields = {
        "model": MODEL,
        "objective": CausalLMConfig(),
        "optimizer": AdamWConfig(learning_rate=1e-5, beta2=0.999, schedule=ScheduleConfig(decay="constant")),
        "steps": 30,
    }
    mesh, rules = make_mesh(MeshConfig(), devices=jax.devices()[:1]), changes.pop("rules", {})
    return Program(make_step(**{**fields, **changes}), mesh, rules)


def make_batch(rows=4, seq=8):
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (rows, seq + 1), dtype=np.int32)
    positions = np.tile(np.arange(seq, dtype=np.int32), (rows, 1))
    segments = np.ones((rows, seq), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segment_ids": segments}


def published(program):
    """The values of a checkpoint in bfloat16."""
    params = program.init(key=jax.random.key(1)).params
    return jax.tree.map(lambda x: x.astype(BF16), params)


def train(program, values, steps=30):
    """Losses, and the parameters at the end."""
    state, batch, losses = program.init(values, key=jax.random.key(0)), make_batch(), []
    step = jax.jit(program.on_mesh(program.step))
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def floats(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


def vector(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("rate", [1e-6, pytest.param(1e-5, marks=pytest.mark.slow)])
def test_a_bfloat16_checkpoint_trains_exactly_as_its_values_in_float32(rate):
    optimizer = AdamWConfig(learning_rate=rate, beta2=0.999, schedule=ScheduleConfig(decay="constant"))
    program = make_program(optimizer=optimizer)
    values = published(program)
    wide = make_program(optimizer=optimizer, model=dataclasses.replace(MODEL, param_dtype="float32"))
    losses, state = train(program, jax.tree.map(jnp.copy, values))
    expected_losses, expected = train(wide, jax.tree.map(lambda x: x.astype(F32), values))
    assert losses == expected_losses and losses[-1] < losses[0]
    assert (vector(state.params) == vector(expected.params)).all()
    assert np.mean(vector(state.params) != vector(values)) > 0.94
    assert floats((state.params, state.opt_state)) == {"float32"}


def test_bfloat16_parameters_move_as_far_as_float32_ones_and_steps_are_reproducible():
    program = make_program(precision=IN_BF16, accumulation_steps=2)
    values = published(program)
    start = vector(values)
    (_, state), (_, again) = (train(program, jax.tree.map(jnp.copy, values)) for _ in range(2))
    _, wide = train(make_program(accumulation_steps=2), jax.tree.map(jnp.copy, values))
    assert (vector(state.params) == vector(again.params)).all()
    moved, expected = vector(state.params) - start, vector(wide.params) - start
    # Rounded to the nearest, the projection is below .2: most updates of 1e-5 vanish.
    assert moved @ expected / (expected @ expected) == pytest.approx(1, abs=0.25)
    assert floats(state.params) == {"bfloat16"} and floats(state.opt_state) == {"float32"}
    memory = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert 2 * memory == sum(x.nbytes for x in jax.tree.leaves(wide.params))


def test_stochastic_rounding_keeps_the_mean_and_every_exact_value():
    ones, key = jnp.ones(100_000, BF16), jax.random.key(0)
    rounded = apply_updates({"w": ones}, {"w": jnp.full(ones.shape, 1e-3, F32)}, key=key)["w"]
    assert set(np.unique(rounded.astype(F32)).tolist()) == {1.0, 1.0078125}
    assert float(jnp.mean(rounded.astype(F32))) == pytest.approx(1.001, abs=5e-5)
    exact = jnp.array([0.0, -1.5, 3e38, jnp.inf, -jnp.inf, jnp.nan], BF16)
    kept = apply_updates(exact, jnp.zeros(exact.shape, F32), key=key)
    np.testing.assert_array_equal(kept.astype(F32), exact.astype(F32))
    assert apply_updates(jnp.ones(1), jnp.full(1, 2**-20, BF16), key=key)[0] == 1 + 2**-20
    with pytest.raises(TrainingError, match=r"'w' is float16; .*float32 or bfloat16"):
        apply_updates({"w": jnp.ones(1, jnp.float16)}, {"w": jnp.ones(1)}, key=key)


def test_second_moments_decay_in_float32_whatever_the_parameters_are():
    adam = widen_optimizer(optax.scale_by_adam(b2=0.999))
    params = jnp.ones(1, BF16)
    with jax.numpy_dtype_promotion("standard"):
        _, state = adam.update(jnp.full(1, 20**0.5, BF16), adam.init(params), params)
        body = lambda _, state: adam.update(jnp.full(1, 1e-4, BF16), state, params)[1]
        nu = float(jax.lax.fori_loop(0, 2000, body, state).nu[0])
    assert nu == pytest.approx(0.0027, abs=1e-4)  # in bfloat16 0.0198: it stays where it is


@pytest.mark.parametrize("name", registries.optimizers.names())
def test_every_optimizer_keeps_float32_states_of_bfloat16_parameters(name):
    optimizer = parse(registries.optimizers[name], {"name": name, "ema_decay": None})
    program = make_program(optimizer=optimizer, precision=IN_BF16)
    state = program.abstract_state
    assert floats(jax.eval_shape(program.step.evaluation_variables, state)) == {"bfloat16"}  # averages too
    assert floats(state.params) == {"bfloat16"} and floats(state.opt_state) == {"float32"}


# A family of each kind of layer, and Gemma 4, which has parameters that are not trained.
COVERING = ("llama", "gemma4", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "pixtral", "bert", "t5", "flux")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COVERING else pytest.mark.slow) for name in registries.models.names()],
)
def test_every_family_published_in_bfloat16_is_trained_in_float32(name):
    family = registries.models[name]
    program = make_program(model=(family, family.config_class(param_dtype="bfloat16")))
    state = program.abstract_state
    # The scale of each layer of Gemma 4 and the positions of Stable Diffusion 3 are not trained, and keep their dtype.
    untrained = {"float32", "bfloat16"} if name in ("gemma4", "gemma4_vision", "sd3") else {"float32"}
    assert floats((state.params, state.opt_state)) == {"float32"}
    assert floats(state.mutable) <= untrained and not floats(state.frozen)


@pytest.mark.parametrize(("precision", "dtype"), [(Precision(), "float32"), (IN_BF16, "bfloat16")])
def test_a_model_of_the_objective_is_trained_in_the_same_dtype(precision, dtype):
    class Critic(nnx.Module):
        def __init__(self, config, *, key):
            self.kernel = nnx.Param(jnp.zeros(config.embed, config.param_dtype), logical_axes=("embed",))

    class Objective(type(CausalLMConfig())):
        auxiliary_models: ClassVar = {"critic": Critic}

    state = make_program(objective=Objective(), precision=precision).abstract_state
    assert floats(state.auxiliary["critic"].params) == floats(state.params) == {dtype}
    assert floats(state.auxiliary["critic"].opt_state) == {"float32"}


def test_microbatches_of_bfloat16_parameters_are_summed_in_float32():
    batch = make_batch(rows=64)
    one, summing = make_program(precision=IN_BF16), make_program(precision=IN_BF16, accumulation_steps=64)
    state, gradients = one.init(key=jax.random.key(0)), jax.jit(one.on_mesh(one.step.gradients))
    rows = [{name: x[row : row + 1] for name, x in batch.items()} for row in range(64)]
    expected = np.mean([vector(gradients(state, row)[0]) for row in rows], axis=0)
    found, metrics, _ = jax.jit(summing.on_mesh(summing.step.gradients))(state, batch)
    assert floats(found) == {"float32"} and float(metrics["loss"].weight) == 64 * 8
    error = np.linalg.norm(vector(found) - expected) / np.linalg.norm(expected)
    assert error < 1e-6  # in bfloat16 about .02


def test_only_narrow_floats_are_widened():
    """A cast to float32 would drop imaginary parts and the last bits of integers."""
    tree = {name: jnp.zeros(2, name) for name in ("bfloat16", "float16", "float32", "complex64", "int32")}
    found = {name: str(leaf.dtype) for name, leaf in widen(tree).items()}
    assert found == dict(zip(tree, [*["float32"] * 3, "complex64", "int32"], strict=True))


def test_gradients_of_a_row_taken_often_are_summed_in_float32():
    table, tokens = jnp.ones((3, 4), BF16), jnp.where(jnp.arange(2000).reshape(2, 1000) % 100 == 0, 2, 1)
    gradient = jax.grad(lambda table: jnp.sum(lookup(table, tokens, "bfloat16").astype(F32)))(table)
    np.testing.assert_array_equal(gradient[:, 0].astype(F32), [0, BF16(1980), 20])
    tangent = jax.jvp(lambda table: take_rows(table, jnp.array([1, 7])), (table,), (2 * table,))[1]
    np.testing.assert_array_equal(tangent.astype(F32), [[2] * 4, [0] * 4])


def test_what_is_frozen_keeps_the_dtype_of_the_checkpoint_and_a_reference_is_the_policy_exactly():
    optimizer = AdamWConfig(groups={"mlp|feed_forward": GroupConfig(frozen=True)})

    class Referenced(CausalLMConfig):
        auxiliary_models: ClassVar = {"reference": "init"}

    program = make_program(optimizer=optimizer, objective=Referenced())
    state = program.init(key=jax.random.key(0))
    assert (floats(state.params), floats(state.frozen)) == ({"float32"}, {"bfloat16"})
    assert (vector(state.auxiliary["reference"].params) == vector(state.params)).all()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), program.abstract_state
    )


def test_a_family_whose_config_has_no_param_dtype_cannot_be_held_in_bfloat16():
    class Config:
        family = "own"

    with pytest.raises(ConfigError, match=r"precision\.params is 'bfloat16', and Config has no param_dtype"):
        IN_BF16.training_config(Config())
    config = Config()
    assert Precision().training_config(config) is config


def test_an_optax_transformation_does_what_the_same_config_does():
    schedule = ScheduleConfig(warmup_steps=0, decay="constant")
    config = AdamWConfig(learning_rate=1e-3, weight_decay=0.0, clip_norm=None, schedule=schedule)
    given = optax.adamw(1e-3, config.beta1, config.beta2, config.epsilon, weight_decay=0.0)
    (losses, state), (expected_losses, expected) = (
        train(make_program(optimizer=each, precision=IN_BF16), {}, steps=3) for each in (given, config)
    )
    assert losses == expected_losses and (vector(state.params) == vector(expected.params)).all()


@pytest.mark.parametrize(
    "given",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(1e-2)),
        pytest.param(optax.MultiSteps(optax.lion(1e-3), 2).gradient_transformation(), marks=pytest.mark.slow),
    ],
    ids=["chain", "multi_steps"],
)
def test_optax_optimizers_learn_and_have_shardings(given):
    program = make_program(optimizer=given)
    state = program.init(key=jax.random.key(0))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(program.state_shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    losses, _ = train(program, {}, steps=6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("given", ["adamw", optax.adamw, None], ids=["name", "function", "none"])
def test_what_is_no_optimizer_is_refused_by_name(given):
    with pytest.raises(ConfigError, match=r"optimizer is .*AdamWConfig.*optax\.adamw\(3e-4\)"):
        make_program(optimizer=given)
