"""Pipeline stages refuse by name what they cannot divide; `pipeline_on_eight_devices.py` trains the rest."""

from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, ShardingError, TrainingError
from stack_core.abi.plugins import registries
from stack_train.models.llama import LlamaConfig
from stack_train.nn.pipeline import Values, run_stages
from stack_train.nn.schedules import schedule
from stack_train.objectives import CausalLMConfig
from stack_train.optim import SgdConfig
from stack_train.step.step import make_step

from .test_replicas import Identity, WithReference

MODEL = LlamaConfig(vocab_size=32, layers=2, embed=16, heads=2, mlp=16, max_positions=16)
SCHEDULE = schedule("1f1b", stages=2, microbatches=2, chunks=1)


class ComparesRows(CausalLMConfig):
    compares_rows = True


class WithCritic(CausalLMConfig):
    auxiliary_models = MappingProxyType({"critic": registries.models["llama"].build})


class Shared(NamedTuple):
    """A quantized array whose layers share their scales."""

    codes: np.ndarray = np.zeros((2, 8), np.int8)
    scale: np.ndarray = np.ones((1, 8), np.float32)

    @property
    def shape(self):
        return self.codes.shape


def step_of(objective, **changes):
    return make_step(MODEL, objective, SgdConfig(), schedule=SCHEDULE, **changes)


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        (ComparesRows(), {}, "the objective compares the rows of a whole batch"),
        (
            WithReference(),
            {"transform": Identity()},
            "the objective's model reference is a copy of a model that sections",
        ),
        (WithCritic(), {}, "the objective trains layers of the model critic"),
    ],
)
def test_an_objective_that_stages_cannot_divide_is_named(objective, changes, message):
    with pytest.raises(ConfigError, match=f"mesh.stage is more than 1, but {message}"):
        step_of(objective, **changes)


def test_rows_that_do_not_divide_into_microbatches_are_named():
    step = step_of(CausalLMConfig())
    batch = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jax.ShapeDtypeStruct((3, 8), "int32"))
    with pytest.raises(
        TrainingError, match=r"positions has 3 rows, which run\.pipeline\.microbatches=2 does not divide"
    ):
        jax.eval_shape(step.evaluate, step.model.variables.abstract, batch)


def test_scales_that_layers_share_are_named():
    layers = Values({}, {}, {"query": Shared()})
    arguments = {"microbatches": {}, "schedule": SCHEDULE, "gradients": False, "specs": ({}, {})}
    with pytest.raises(ShardingError, match="query is quantized with scales that its 2 layers share"):
        run_stages(lambda *_: None, layers, Values({}, {}, {}), **arguments)
