"""Objectives that call frozen models: the run's own start and another run's model; verified on resume."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import config, parse
from stack_core.abi.errors import CheckpointError, ConfigError, TrainingError
from stack_core.abi.metrics import Metric
from stack_core.abi.objectives import Objective
from stack_core.abi.plugins import registries
from stack_train.checkpoint import CheckpointStore
from stack_train.objectives import CausalLMConfig, check_inputs
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.weights import read_params

INPUTS = MappingProxyType(dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq"))


@config
class DistanceConfig(Objective):
    """The mean square distance of the hidden states to those of auxiliary models."""

    name: Literal["distance"] = "distance"
    sources: Mapping[str, str]
    inputs: ClassVar[Mapping[str, str]] = INPUTS

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return self.sources

    def __call__(self, model, batch, *, key, **auxiliary):
        arrays = batch["tokens"], batch["positions"], batch["segment_ids"]
        hidden = model(*arrays).hidden
        others = {name: other(*arrays).hidden for name, other in auxiliary.items()}
        distances = {name: jnp.mean((hidden - other).astype(jnp.float32) ** 2) for name, other in others.items()}
        loss = sum(distances.values())
        metrics = {name: Metric.max(distance) for name, distance in distances.items()}
        return loss, {"loss": Metric.mean(loss, jnp.float32(batch["tokens"].size)), **metrics}


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setitem(registries.objectives._resolved, "distance", DistanceConfig)  # as a plugin would register it
    (tmp_path / "text.txt").write_text("one two buckle my shoe, three four knock at the door. " * 20)

    def build(name, objective=None, **settings):
        data = {"source": f"text:{tmp_path}/text.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
        model = {"name": "llama", "vocab_size": 262, "layers": 1, "embed": 8, "heads": 2, "mlp": 16}
        base = {"output": str(tmp_path / name), "data": data, "model": model, "run": {"steps": 2, **settings}}
        frozen = {"embedding": {"frozen": True}}
        optimizer = {"learning_rate": 0.01, "schedule": {"decay": "constant"}, "groups": frozen}
        parsed = parse(RunConfig, {**base, "optimizer": optimizer, "checkpoint": {"every_steps": 1}})
        return parsed if objective is None else type(parsed)(**{**vars(parsed), "objective": objective})

    return build


def losses(config):
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def test_frozen_models_stay_as_they_were_and_are_verified_when_the_run_goes_on(config_of, tmp_path):
    teacher = config_of("teacher", seed=1)
    train(teacher)
    distance = DistanceConfig(sources={"reference": "init", "teacher": f"run:{teacher.output}"})
    whole = config_of("whole", distance, accumulation_steps=2, steps=3)
    train(whole)
    config = config_of("student", distance, accumulation_steps=2)
    shutil.copytree(whole.output, config.output)
    shutil.rmtree(Path(config.output) / "checkpoints" / "00000003")
    first, second, last = losses(whole)
    assert first["reference"] == 0.0 < second["reference"]
    assert second["teacher"] < first["teacher"]
    with CheckpointStore(f"{config.output}/checkpoints") as store:
        names, document = store.leaf_names(2), store.path(2) / "frozen.json"
    assert not any("further" in name or "embedding" in name for name in names)
    records = json.loads(document.read_bytes())
    assert {name: record["source"] for name, record in records.items()} == {
        "model": "init",
        "reference": "init",
        "teacher": f"run:{teacher.output}",
    }
    assert set(read_params(tmp_path / "student", config.model)[0]) == {"blocks", "embedding", "lm_head", "norm"}

    train(config_of("student", distance, accumulation_steps=2, steps=3), resume=True)
    assert losses(config)[-1]["loss"] == last["loss"]

    shutil.rmtree(teacher.output)
    train(config_of("teacher", seed=2))
    with pytest.raises(CheckpointError, match=r"come from 'run:.*teacher' \(step 2\), which now differs"):
        train(config_of("student", distance, accumulation_steps=2, steps=4), resume=True)


def test_an_unusable_source_of_a_frozen_model_is_refused(config_of):
    with pytest.raises(ConfigError, match="model 'teacher' comes from 'hf:somewhere'; expected 'init'"):
        build_program(config_of("student", DistanceConfig(sources={"teacher": "hf:somewhere"})))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"targets": None}, r"reads 'targets' of a batch, which the data does not have.*tokens\[4, 8\]"),
        ({"targets": (4, 2, 8)}, r"reads 'targets' as \[batch, seq\], but a batch has targets\[4, 2, 8\]"),
        ({"targets": (4, 7)}, "'targets' and 'tokens' with one size of seq"),
    ],
)
def test_a_batch_without_what_an_objective_reads_is_refused(shapes, message):
    batch = dict.fromkeys(INPUTS, (4, 8)) | shapes
    arrays = {name: np.zeros(shape, np.int32) for name, shape in batch.items() if shape is not None}
    with pytest.raises(ConfigError, match=message):
        check_inputs(CausalLMConfig().build(), arrays)


def test_an_objective_must_say_what_its_loss_was_averaged_over(config_of):
    class Careless(DistanceConfig):
        def __call__(self, model, batch, *, key, **auxiliary):
            return jnp.float32(0.0), {"loss": jnp.float32(0.0)}

    config = config_of("careless", Careless(sources={}))
    with pytest.raises(TrainingError, match="no metric 'loss' that is a mean"):
        build_program(config).trace(config.data.spec(config.model))
