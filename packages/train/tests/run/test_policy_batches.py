"""Data that the policy makes: a kind of thirty lines gets the weights after each step, and draws from them."""

from typing import Any, Literal

import jax
import numpy as np
import pytest

from stack_core.abi.config import config, parse
from stack_core.abi.errors import ConfigError, PluginError
from stack_core.abi.policy import PolicyBatches
from stack_train.data.kinds.arrays import ArraysIterator
from stack_train.data.kinds.text import language_model_shapes
from stack_train.run.config import RunConfig
from stack_train.run.run import build
from stack_train.run.train import start


class Echoes(PolicyBatches):
    """Rows that hold the version of the weights, and a score of the row before."""

    def __init__(self):
        self.versions, self.scores, self.norms = [], [], []

    def _batches(self):
        while True:
            row = np.full((2, 8), 1 + self.versions[-1] % 4, np.int32)
            yield {"tokens": row, "targets": row, "positions": np.tile(np.arange(8, dtype=np.int32), (2, 1)),
                   "segment_ids": np.ones_like(row)}  # fmt: skip

    def train_iterator(self):
        return ArraysIterator(self._batches, "echoes")

    def update_weights(self, params, version, score):
        self.versions.append(version)
        self.scores.append(score(params, next(self._batches()))["logprobs"])
        self.norms.append(float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(params))))


DATA = Echoes()
MODEL = {"name": "llama", "vocab_size": 8, "layers": 1, "embed": 8, "heads": 2, "mlp": 8}


@config
class EchoData:
    name: Literal["echoes"] = "echoes"

    def spec(self, model: Any) -> Any:
        return language_model_shapes(2, 8)

    def work(self) -> tuple[str, int]:
        return "tokens", 16

    def check(self, model: Any) -> None: ...

    def build(self, *, seed: int, model: Any) -> Echoes:
        return DATA


def test_the_loop_hands_over_the_weights_after_each_step(tmp_path):
    base = parse(RunConfig, {"output": str(tmp_path / "run"), "model": MODEL, "run": {"steps": 3}})
    run = build(RunConfig(output=base.output, model=base.model, run=base.run, data=EchoData()))
    assert isinstance(run.data, PolicyBatches)
    start(run)
    assert DATA.versions == [0, 1, 2, 3]
    assert len(set(DATA.norms)) == 4  # each time other weights
    assert all(found.shape == (2, 8) and (found < 0).all() for found in DATA.scores)


def test_a_ramp_of_its_batches_is_refused(tmp_path):
    mapping = {"output": str(tmp_path / "run"), "model": MODEL, "run": {"ramp": [{"rows": 1, "steps": 2}]}}
    base = parse(RunConfig, mapping)
    with pytest.raises(ConfigError, match=r"data.name 'echoes' makes its batches with the policy. Leave run.ramp out"):
        build(RunConfig(output=base.output, model=base.model, run=base.run, data=EchoData()))


def test_data_of_another_class_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(EchoData, "build", lambda self, *, seed, model: object())
    base = parse(RunConfig, {"output": str(tmp_path / "run"), "model": MODEL, "run": {"steps": 3}})
    with pytest.raises(PluginError, match=r"data.name 'echoes' built a object; expected a stack_core.abi.data.Batches"):
        build(RunConfig(output=base.output, model=base.model, run=base.run, data=EchoData()))
    assert not (tmp_path / "run").exists()
