"""The training step: pure, compiled once, its state donated, its gradients those of the whole batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import TrainingError
from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.llama import LlamaConfig
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, ScheduleConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

MODEL = LlamaConfig(
    vocab_size=61,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    mlp=24,
    max_positions=32,
    dtype="float32",
    initializer_std=0.2,
)


def make_program(**changes):
    fields = {
        "model": MODEL,
        "objective": CausalLMConfig(),
        "optimizer": AdamWConfig(learning_rate=1e-2, schedule=ScheduleConfig(warmup_steps=2)),
        "steps": 20,
    }
    mesh, rules = make_mesh(MeshConfig(), devices=jax.devices()[:1]), changes.pop("rules", {})
    return Program(make_step(**{**fields, **changes}), mesh, rules)


def make_batch(seed=0, rows=4, seq=12):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, seq + 1), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, : seq // 2] = -100  # rows weigh differently, so that a mean of means would be wrong
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "positions": np.tile(np.arange(seq, dtype=np.int32), (rows, 1)),
        "segment_ids": np.ones((rows, seq), np.int32),
    }


@pytest.fixture(scope="module")
def program():
    return make_program()


@pytest.fixture(scope="module")
def step(program):
    """Of `program`, compiled for batches like `make_batch()`."""
    return program.compile(make_batch())


def leaves(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_a_run_of_steps_learns_one_batch_by_heart(program, step):
    state, batch = program.init(key=jax.random.key(0)), make_batch()
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(MODEL.vocab_size), rel=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 20


def test_the_state_is_donated(program, step):
    state = program.init(key=jax.random.key(0))
    before = jax.tree.leaves(state.params)
    step(state, make_batch())
    assert all(leaf.is_deleted() for leaf in before)


def test_another_batch_than_the_compiled_one_is_named(program, step):
    batch = make_batch()
    rows = batch["tokens"].shape[0]
    longer = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    state = program.init(key=jax.random.key(0))
    message = rf"batch\['tokens'\] is int32\[{2 * rows}, .*compiled for int32\[{rows}, .*Call program\.compile\(batch\)"
    with pytest.raises(TrainingError, match=message):
        step(state, longer)
    with pytest.raises(TrainingError, match=r"batch\['tokens'\] is absent, .*batch\['text'\] is int32\["):
        step(state, {("text" if name == "tokens" else name): value for name, value in batch.items()})
    with pytest.raises(TrainingError, match=r"batch\['tokens'\] is float32\["):
        step(state, batch | {"tokens": batch["tokens"].astype(jnp.float32)})
    with pytest.raises(TrainingError, match=r"Call program\.compile_evaluation\(batch\)"):
        program.compile_evaluation(batch)(program.step.variables(state), longer)
    state, metrics = step(state, batch)
    assert float(metrics["loss"]) > 0, "a refused batch leaves the state as it is"
    wide = {name: np.asarray(value, np.int64) for name, value in batch.items()}
    assert float(step(state, wide)[1]["loss"]) > 0, "NumPy's default integers are int32 on a device"


def test_batches_with_fewer_rows_compile_once_per_announced_number_of_rows(program, monkeypatch):
    batch, traced = make_batch(), []
    fewer = {name: value[:2] for name, value in batch.items()}
    compiled = program.trace(batch).lower().compile()
    step = program.runnable(compiled, batch, row_counts=(2,))
    trace = Program.trace
    monkeypatch.setattr(Program, "trace", lambda self, shapes: traced.append(len(traced)) or trace(self, shapes))
    state = program.init(key=jax.random.key(0))
    for given in (fewer, batch, fewer):
        state, metrics = step(state, given)
    assert int(state.step) == 3 and traced == [0] and float(metrics["loss"]) > 0
    for wrong in ({name: value[:1] for name, value in batch.items()}, fewer | {"tokens": fewer["tokens"][:, :3]}):
        with pytest.raises(TrainingError, match=r"batch\['tokens'\] is int32\[.*compiled for int32\["):
            step(state, wrong)


def test_a_batch_is_split_by_microbatches():
    assert make_program(accumulation_steps=3).batch_parts == 3


def test_the_same_key_gives_the_same_state_and_another_gives_another(program):
    first, same, other = (leaves(program.init(key=jax.random.key(seed)).params) for seed in (0, 0, 1))
    assert all((first[name] == same[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_gradients_are_those_of_the_whole_batch(program, step, parts):
    batch, accumulating = make_batch(), make_program(accumulation_steps=parts)
    whole, whole_metrics = step(program.init(key=jax.random.key(0)), batch)
    summed, summed_metrics = accumulating.compile(batch)(accumulating.init(key=jax.random.key(0)), batch)
    assert float(whole_metrics["loss"].weight) == float(summed_metrics["loss"].weight)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(float(summed_metrics[name]), float(whole_metrics[name]), rtol=1e-5)
    expected, got = leaves(whole.opt_state), leaves(summed.opt_state)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=1e-7, err_msg=name)


def test_metrics_report_the_schedule_and_the_norm_before_clipping():
    program, batch = (
        make_program(optimizer=AdamWConfig(clip_norm=1e-6, schedule=ScheduleConfig(warmup_steps=9))),
        make_batch(),
    )
    _, metrics = program.compile(batch)(program.init(key=jax.random.key(0)), batch)
    assert float(metrics["learning_rate"]) == pytest.approx(3e-4 / 10)
    assert float(metrics["grad_norm"]) > 1e-3


def test_evaluation_is_the_objective_without_an_update(program, step):
    batch = make_batch()
    state = program.init(key=jax.random.key(0))
    evaluated = float(program.compile_evaluation(batch)(program.step.variables(state), batch)["loss"])
    _, metrics = step(state, batch)
    assert evaluated == pytest.approx(float(metrics["loss"]), rel=1e-6)


def test_every_leaf_of_the_state_has_the_sharding_of_its_rule(program):
    state = program.init(key=jax.random.key(0))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(program.state_shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_optimizer_moments_have_the_structure_of_the_parameters(program):
    moments = [leaf.shape for leaf in jax.tree.leaves(program.abstract_state.opt_state) if leaf.ndim]
    parameters = [leaf.shape for leaf in jax.tree.leaves(program.step.model.variables.trained)]
    assert sorted(moments) == sorted(2 * parameters)


def test_the_z_loss_changes_the_loss():
    batch = make_batch()
    plain, with_z = (
        float(program.compile_evaluation(batch)(program.init(key=jax.random.key(0)).params, batch)["loss"])
        for program in (make_program(objective=CausalLMConfig(z_loss=z)) for z in (0.0, 0.1))
    )
    assert with_z > plain


def test_bfloat16_compute_keeps_float32_parameters():
    program, batch = make_program(model=dataclasses.replace(MODEL, dtype="bfloat16")), make_batch()
    state, metrics = program.compile(batch)(program.init(key=jax.random.key(0)), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert np.isfinite(float(metrics["loss"]))
