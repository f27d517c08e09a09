"""Runs that train a part of a model: checkpoints hold that part, and the source of the rest is read again, verified."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import CheckpointError
from stack_train.checkpoint import CheckpointStore
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.model_variables import stored_values
from stack_train.variables.weights import read_model, read_params

TRAINED = ("blocks/0/0/feed_forward/up/kernel", "norm")


@pytest.fixture
def config_of(tmp_path):
    rows = np.random.default_rng(0).integers(0, 32, (16, 17))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in rows))

    def build(name, **changes):
        sections = {
            "output": str(tmp_path / name),
            "model": {"name": "llama", "vocab_size": 262, "layers": 2, "embed": 8, "heads": 2, "mlp": 16},
            "data": {
                "source": f"jsonl:{tmp_path}/rows.jsonl",
                "seq_tokens": 16,
                "batch_size": 4,
                "validation_fraction": 0.0,
            },
            "optimizer": {
                "learning_rate": 0.05,
                "schedule": {"decay": "constant"},
                "groups": {"up|norm": {}, ".*": {"frozen": True}},
            },
            "run": {"steps": 4},
            "checkpoint": {"every_steps": 2, "keep": 10},
        }
        merged = {section: {**sections[section], **values} for section, values in changes.items()}
        return parse(RunConfig, {**sections, **merged})

    return build


def checkpoint(config, step=4):
    with CheckpointStore(f"{config.output}/checkpoints") as store:
        return set(store.leaf_names(step)), store.path(step)


def values(tree):
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)]


def test_a_frozen_part_is_addressed_and_a_resumed_run_ends_bitwise_alike(config_of, monkeypatch):
    whole, cut = config_of("whole"), config_of("cut")
    train(whole)
    shutil.copytree(whole.output, cut.output)
    shutil.rmtree(checkpoint(cut)[1])
    train(cut, resume=True)
    names, path = checkpoint(whole)
    assert {name for name in names if name.startswith("params/")} == {f"params/{name}" for name in TRAINED}
    assert not any(name.startswith("moved/") or "embedding" in name for name in names)
    record = json.loads((path / "frozen.json").read_bytes())["model"]
    assert record["source"] == "init" and len(record["sha256"]) == 64 and "embedding" in record["leaves"]
    states = [stored_values(read_model(whole_or_cut, config)[0]) for whole_or_cut, config in _runs(whole, cut)]
    for one, other in zip(*map(values, states), strict=True):
        np.testing.assert_array_equal(one, other)


def _runs(*configs):
    return [(Path(config.output), config) for config in configs]


def test_a_part_trained_on_another_run_reads_its_source_and_refuses_a_changed_one(config_of):
    base = config_of("base", optimizer={"groups": {}})
    train(base)
    ((base_path, _),) = _runs(base)
    tuned = config_of("tuned", run={"init_from": base.output, "steps": 2})
    train(tuned)
    ((tuned_path, _),) = _runs(tuned)
    before, after = read_params(base_path, base.model)[0], read_params(tuned_path, tuned.model)[0]
    np.testing.assert_array_equal(before["embedding"], after["embedding"])
    assert not np.array_equal(before["norm"], after["norm"])
    record = checkpoint(tuned, 2)[1] / "frozen.json"
    assert json.loads(record.read_bytes())["model"]["source"] == f"run:{base_path}"

    shutil.rmtree(base_path)
    train(config_of("base", optimizer={"groups": {}}, run={"seed": 1}))
    with pytest.raises(CheckpointError, match=r"come from 'run:.*' \(step 4\), which now differs:\n  blocks"):
        train(config_of("tuned", run={"init_from": base.output, "steps": 4}), resume=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"ema_decay": 0.9},
        pytest.param({"name": "schedule_free", "schedule": {"decay": "constant"}}, marks=pytest.mark.slow),
    ],
)
def test_averages_are_evaluated_and_exported(config_of, optimizer):
    config = config_of("averaged", optimizer={"groups": {}, **optimizer})
    summary = train(config)
    ((path, _),) = _runs(config)
    with CheckpointStore(path / "checkpoints") as store:
        program = build_program(config)
        state = store.restore(program.abstract_state).state
    expected = program.step.evaluation_variables(state)
    for one, other, trained in zip(
        *map(values, (read_params(path, config.model)[0], expected, state.params)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        assert not np.array_equal(one, trained)
    assert summary.step == 4
