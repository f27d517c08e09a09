"""Training of indexers by their own loss, which leaves the rest of a model as it is."""

import dataclasses
import functools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_train.checkpoint import CheckpointStore
from stack_train.models import deepseek_v32
from stack_train.models.deepseek_v32 import DeepseekV32Config
from stack_train.objectives import CausalLMConfig
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.model_variables import stored_values
from stack_train.variables.weights import read_model

CONFIG = DeepseekV32Config(
    vocab_size=37,
    embed=24,
    layers=1,
    heads=3,
    mlp=20,
    query_rank=10,
    kv_rank=9,
    nope_dim=6,
    rope_dim=4,
    value_dim=5,
    index_heads=4,
    index_dim=6,
    index_count=4,
    dense_layers=1,
    max_positions=32,
    dtype="float32",
    initializer_std=0.3,
)
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 19), dtype=np.int32)
SEGMENTS = np.repeat(np.array([[1] * 11 + [2] * 5 + [0] * 2], np.int32), 2, axis=0)
BATCH = {
    "tokens": jnp.asarray(TOKENS[:, :-1]),
    "targets": jnp.asarray(np.where(SEGMENTS == 0, -100, TOKENS[:, 1:])),
    "positions": jnp.tile(jnp.concatenate([jnp.arange(11), jnp.arange(5), jnp.arange(2)]), (2, 1)),
    "segment_ids": jnp.asarray(SEGMENTS),
}


@functools.cache
def initial_values():
    return jax.tree.leaves(jax.jit(lambda: nnx.state(deepseek_v32.FAMILY.build(CONFIG, key=jax.random.key(0))))())


def gradients(training, **changes):
    """Returns the gradients by path, the loss and the metrics of a model with the same initial values."""
    config = dataclasses.replace(CONFIG, index_training=training, **changes)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: deepseek_v32.FAMILY.build(config, key=jax.random.key(0))))
    params = jax.tree.unflatten(jax.tree.structure(shapes), initial_values())
    objective = CausalLMConfig(index_loss=0.0 if training == "frozen" else 0.7)
    loss = lambda params: objective(nnx.merge(graph, params, copy=True), BATCH, key=jax.random.key(0))
    (total, metrics), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    found = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(found)}
    return found, float(total), {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("training", "alike"),
    [("dense", {"index_count": 18}), ("sparse", {})],  # attention to as many keys as there are is dense
)
def test_only_indexers_have_gradients_of_their_loss(training, alike):
    expected, loss, _ = gradients("frozen", **alike)
    found, total, metrics = gradients(training)
    np.testing.assert_allclose(total, loss + 0.7 * metrics["index_loss"], rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if "indexer" in name:
            assert not gradient.any() and (np.abs(found[name]) > 1e-6).any(), name
        else:
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-6, err_msg=name)
    assert ("index_share" in metrics) == (training == "dense")


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("red or blue, up or down, one and two " * 60)

    def build(name, **changes):
        fields = dataclasses.asdict(CONFIG) | {"vocab_size": 262}
        sections = {
            "output": str(tmp_path / name),
            "model": {key: value for key, value in fields.items() if value is not None},
            "data": {
                "source": f"text:{tmp_path}/text.txt",
                "seq_tokens": 24,
                "batch_size": 4,
                "validation_fraction": 0.0,
            },
            "objective": {"name": "causal_lm", "index_loss": 1.0},
            "optimizer": {"learning_rate": 0.02, "schedule": {"decay": "constant"}},
            "run": {"steps": 4},
            "checkpoint": {"every_steps": 2, "keep": 10},
        }
        return parse(RunConfig, {**sections, **{key: {**sections[key], **changes[key]} for key in changes}})

    return build


WARM_UP = {"model": {"index_training": "dense"}, "optimizer": {"groups": {"indexer": {}, ".*": {"frozen": True}}}}


def test_an_indexer_learns_the_attention_of_a_model(config_of):
    """The initial weights are large, so that attention is uneven."""
    model = {**WARM_UP["model"], "initializer_std": 0.6}
    program = build_program(config_of("warm", **{**WARM_UP, "model": model}), jax.devices()[:1])
    params = jax.tree.leaves_with_path(program.abstract_state.params)
    assert params and all("indexer" in jax.tree_util.keystr(path) for path, _ in params)
    state, step = program.init(key=jax.random.key(0)), jax.jit(program.step)
    random, found = np.random.default_rng(0), []
    for _ in range(150):
        tokens = random.integers(0, 16, (4, 25), dtype=np.int32)
        places, ones = np.tile(np.arange(24, dtype=np.int32), (4, 1)), np.ones((4, 24), np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": places, "segment_ids": ones}
        state, metrics = step(state, batch)
        found.append({name: float(metrics[name].value) for name in ("index_loss", "index_share")})
    loss, share = ([each[name] for each in found] for name in ("index_loss", "index_share"))
    assert np.mean(loss[-5:]) < 0.3 * np.mean(loss[:5])
    assert np.mean(share[-5:]) > np.mean(share[:5]) + 0.15


def final_values(config):
    with CheckpointStore(f"{config.output}/checkpoints") as store:
        names = {name for name in store.leaf_names(4) if name.startswith("params/")}
    return names, jax.tree.leaves(stored_values(read_model(Path(config.output), config)[0]))


@pytest.mark.slow  # compiles four runs
def test_a_warm_up_resumes_bitwise_and_is_followed_by_training_of_the_whole_model(config_of):
    base = config_of("base", objective={"index_loss": 0.0})
    train(base)
    whole, cut = (config_of(name, **WARM_UP, run={"init_from": base.output}) for name in ("whole", "cut"))
    train(whole)
    shutil.copytree(whole.output, cut.output)
    with CheckpointStore(f"{cut.output}/checkpoints") as store:
        shutil.rmtree(store.path(4))
    train(cut, resume=True)
    (names, expected), (_, found) = final_values(whole), final_values(cut)
    assert names and all("/indexer/" in name for name in names)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    sparse = config_of("sparse", model={"index_training": "sparse"}, run={"init_from": whole.output})
    train(sparse)
    names, _ = final_values(sparse)
    assert any("/indexer/" in name for name in names) and any("embedding" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"index_training": "dense"}, "objective": {"index_loss": 0.0}},
            "model.index_training=dense trains indexers by a loss of their own, which the objective 'causal_lm'",
        ),
        (
            {"model": {"index_training": "sparse"}, "optimizer": {"groups": {"indexer": {"frozen": True}}}},
            "model.index_training=sparse, but optimizer.groups or a section such as lora freezes all indexers",
        ),
    ],
)
def test_training_without_effect_on_indexers_is_refused(config_of, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_program(config_of("refused", **changes))
