"""Objectives that train models of their own: optimized, saved and resumed beside the run's model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, TrainingError
from stack_core.abi.plugins import registries
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.weights import read_params

from ..guided import Guide, GuidedConfig


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setitem(registries.objectives._resolved, "guided", GuidedConfig)  # as a plugin would register it
    for word in ("one two", "three four", "five six"):
        (tmp_path / f"{word}.txt").write_text(f"{word} buckle my shoe, knock at the door. " * 8)

    def build(name, steps=4, **optimizer):
        data = {"source": f"text:{tmp_path}/*.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.2}
        settings = {"learning_rate": 0.02, "schedule": {"decay": "constant"}, "weight_decay": 0.0, **optimizer}
        base = {
            "output": str(tmp_path / name),
            "data": data,
            "model": {"name": "llama", "vocab_size": 262, "layers": 1, "embed": 8, "heads": 2, "mlp": 16},
            "objective": {"name": "guided"},
            "optimizer": settings,
            "run": {"steps": steps, "accumulation_steps": 2},
            "checkpoint": {"every_steps": 2},
        }
        return parse(RunConfig, base)

    return build


def saved(config, step):
    program = build_program(config)
    with CheckpointStore(Path(config.output) / "checkpoints") as store:
        state = store.restore(program.abstract_state.without_frozen(), step).state
    return state, {name: np.asarray(leaf) for name, leaf in named_leaves(replace(state, key=0)).items()}


def records(config, kind):
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_an_auxiliary_model_learns_and_a_run_that_goes_on_ends_bitwise_as_one_that_was_not_cut(config_of):
    whole, cut = config_of("whole"), config_of("cut")
    train(whole)
    steps = records(whole, "train")
    assert steps[-1]["loss"] < steps[0]["loss"] and all(each["guide_grad_norm"] > 0 for each in steps)
    assert records(whole, "evaluation")[-1]["loss"] < steps[0]["loss"]
    shutil.copytree(whole.output, cut.output)
    shutil.rmtree(Path(cut.output) / "checkpoints" / "00000004")
    train(cut, resume=True)
    (state, ours), (_, theirs) = saved(cut, 4), saved(whole, 4)
    assert ours.keys() == theirs.keys()
    assert {"further/guide/params/kernel", "further/guide/params/bias"} < ours.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)
    assert np.abs(state.auxiliary["guide"].params["bias"]).min() > 0.03  # four steps of 0.02
    assert set(read_params(Path(whole.output), whole.model)[0]) == {"blocks", "embedding", "lm_head", "norm"}


def test_groups_and_averages_hold_for_auxiliary_models(config_of):
    slow = config_of("slow", steps=2, groups={"guide/kernel": {"rate_factor": 0.0}}, ema_decay=0.9)
    train(slow)
    first = build_program(slow).init(key=jax.random.key(0)).auxiliary["guide"].params
    state, _ = saved(slow, 2)
    np.testing.assert_array_equal(state.auxiliary["guide"].params["kernel"], first["kernel"])
    averaged = build_program(slow).step.evaluation_auxiliary(state)["guide"]["bias"]
    assert (np.abs(averaged) < np.abs(state.auxiliary["guide"].params["bias"])).all()
    assert set(read_params(Path(slow.output), slow.model)[0]) == {"blocks", "embedding", "lm_head", "norm"}


def test_what_an_objective_says_of_tokens_is_scored(config_of):
    program = build_program(config_of("scored"))
    state = program.init(key=jax.random.key(0))
    tokens = jnp.ones((2, 8), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), tokens)
    found = program.compiled_scores()(program.step.variables(state), batch, {"guide": state.auxiliary["guide"].params})
    assert found["places"].shape == found["logprobs"].shape == (2, 8)
    assert set(program.on_mesh(program.step.score)(program.step.variables(state), batch)) == {"logprobs"}


class Counting(Guide):
    def __init__(self, model, *, key):
        super().__init__(model, key=key)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))


@pytest.mark.parametrize(
    ("made", "optimizer", "error", "message"),
    [
        ({"norm": Guide}, {}, ConfigError, "has an auxiliary model 'norm', which is the name of a module"),
        ({"guide": Counting}, {}, TrainingError, "'guide/calls' .* is a Variable; hold it in an nnx.Param"),
        ({"guide": Guide}, {"groups": {"guide": {"frozen": True}}}, ConfigError, "freezes 'guide/"),
        ({"guide": Guide}, {"groups": {"gide": {}}}, ConfigError, "'gide' matches no parameter"),
    ],
)
def test_what_a_run_cannot_train_is_refused(config_of, made, optimizer, error, message):
    class Other(GuidedConfig):
        auxiliary_models = made

    config = replace(config_of("refused", **optimizer), objective=Other())
    with pytest.raises(error, match=message):
        _ = build_program(config).abstract_state
