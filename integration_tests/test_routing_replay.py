"""Runs on rollouts of mixtures of experts that replay the sampler's experts."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_rl.environments.cell import CellConfig
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.rollouts import RolloutData
from stack_rl.routing import mixture_sizes
from stack_train import build, start
from stack_train.generation.static_engine import StaticEngine
from stack_train.run.train import train

from .test_rollouts import _digests, cell, records

MIXTURE = (
    *("model.name=mixtral", "model.layers=2", "model.embed=32", "model.experts=8", "model.active_experts=2"),
    *("model.unroll=false", "model.remat=full", "model.initializer_std=0.2"),
    *("data.groups=16", "data.group_size=8", "data.seq_tokens=12", "data.packed=true", "data.routing_replay=true"),
    *("objective.minibatches=2", "run.steps=4", "checkpoint.every_steps=3", "run.evaluate_every_steps=0"),
)
SIZES = {"vocab_size": 16, "layers": 2, "embed": 8, "heads": 2, "mlp": 8, "max_positions": 16}


@pytest.fixture
def rounded_sampler(monkeypatch):
    """From the second batch on, the engine rounds its routers to 8 bits and its other weights to bfloat16."""
    update_weights = StaticEngine.update_weights

    def round_leaf(path, leaf):
        dtype = jnp.float8_e4m3fn if "router" in jax.tree_util.keystr(path) else jnp.bfloat16
        return leaf.astype(dtype).astype(leaf.dtype)

    def rounded(self, params, *, version, **how):
        params = jax.tree.map_with_path(round_leaf, params) if version else params
        update_weights(self, params, version=version, **how)

    monkeypatch.setattr(StaticEngine, "update_weights", rounded)


@pytest.mark.slow  # a run and its resumption
def test_replay_removes_the_mismatch_of_other_experts_and_resumes_bitwise(tmp_path, rounded_sampler):
    """Batches of two updates in packed rows; the second update of a batch is made from the journal on resume."""
    run = build(cell(tmp_path / "whole", *MIXTURE))
    mismatches, take = [], run.data.train_iterator

    def compared():
        iterator = take()
        inner = iterator._take

        def next_update():
            batch = inner()
            own = {name: array for name, array in batch.items() if name != "experts"}
            drawn = batch["targets"] != -100
            logprobs = [np.asarray(run.data._policy.score(each)["logprobs"])[drawn] for each in (own, batch)]
            mismatches.append([np.abs(each - batch["behaviour_logprobs"][drawn]) for each in logprobs])
            return batch

        iterator._take = next_update
        return iterator

    run.data.train_iterator = compared
    start(run)
    theirs = {each["step"]: each for each in records(tmp_path / "whole", "train")}
    # Sampler and trainer have the same weights.
    (without, replayed), (rounded_without, rounded_replayed) = mismatches[0], mismatches[2]
    assert theirs[1]["routing_mismatch"] == 0 and max(without.max(), replayed.max()) < 1e-4
    # Rounded weights: without replay, some tokens have other experts.
    assert 0 < theirs[3]["routing_mismatch"] < 0.3
    assert theirs[3]["mismatch"] == pytest.approx(rounded_replayed.mean(), rel=1e-3)
    assert 1.5 * rounded_replayed.mean() < rounded_without.mean()
    assert 4 * rounded_replayed.max() < rounded_without.max()

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000004")
    train(cell(tmp_path / "cut", *MIXTURE), resume=True)
    ours = {each["step"]: each for each in records(tmp_path / "cut", "train")}
    for name in ("loss", "reward", "grad_norm", "mismatch", "routing_mismatch"):
        assert ours[4][name] == theirs[4][name], name
    digests = [_digests(tmp_path / name / "checkpoints" / "00000004") for name in ("cut", "whole")]
    assert digests[0] == digests[1] and len(digests[0]) > 10


def of_mixtures(**settings):
    return parse(registries.models["mixtral"].config_class, {"name": "mixtral", **SIZES, **settings})


def test_batches_have_the_sizes_of_the_mixtures():
    model = of_mixtures(experts=5, active_experts=3)
    assert mixture_sizes(model) == (2, 3)
    data = RolloutData(environment=CellConfig(), routing_replay=True, seq_tokens=8)
    rollouts, plain = (each.for_objective(GRPOConfig()) for each in (data, replace(data, routing_replay=False)))
    rollouts.check(model)
    assert rollouts.spec(model)["experts"].shape == (data.batch_size, 8, 2, 3)
    assert "experts" not in plain.spec(model) and plain.data.draw_digest != data.draw_digest


def test_models_without_experts_and_engines_that_do_not_report_them_are_refused():
    data = RolloutData(environment=CellConfig(), routing_replay=True, seq_tokens=8)
    dense = parse(registries.models["llama"].config_class, {"name": "llama", **SIZES})
    with pytest.raises(ConfigError, match=r"data.routing_replay is true, but the model 'llama' has no mixtures"):
        data.for_objective(GRPOConfig()).check(dense)
    with pytest.raises(ConfigError, match=r"the engine 'llm' does not report the experts .* Set data.engine: static"):
        replace(data, engine="llm").for_objective(GRPOConfig()).check(of_mixtures())
