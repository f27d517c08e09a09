"""Replicas that train apart refuse by name what they do not support; `replicas_on_eight_devices.py` trains them."""

import dataclasses
from types import MappingProxyType

import jax
import pytest

from stack_core.abi.errors import ConfigError, ShardingError, TrainingError
from stack_core.abi.mesh import MeshConfig, ShardingRules
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.deepseek_v3 import DeepseekV3Config
from stack_train.models.llama import LlamaConfig
from stack_train.nn.schedules import schedule
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, OuterConfig, SpikeConfig
from stack_train.step.precision import Precision
from stack_train.step.program import Program
from stack_train.step.replicas import across_replicas, within_replica
from stack_train.step.step import make_step

MODEL = LlamaConfig(vocab_size=32, layers=2, embed=16, heads=2, mlp=16, max_positions=16)
OUTER = OuterConfig(every_steps=5, replicas=2)
BIASED = DeepseekV3Config(
    vocab_size=32,
    layers=2,
    embed=16,
    heads=2,
    mlp=16,
    max_positions=16,
    experts=4,
    active_experts=2,
    expert_mlp=16,
    kv_rank=16,
    nope_dim=8,
    rope_dim=4,
)


class WithReference(CausalLMConfig):
    """Calls the model before the first step."""

    auxiliary_models = MappingProxyType({"reference": "init"})


class Identity:
    """A transform that leaves the model as it is."""

    merges = False

    def apply(self, model):
        return model

    def trained(self, path, variable):
        return True

    def call(self, function, *args, **kwargs):
        return function(*args, **kwargs)


def step_of(optimizer=None, model=MODEL, objective=None, **changes):
    optimizer = AdamWConfig(outer=OUTER) if optimizer is None else optimizer
    return make_step(model, objective or CausalLMConfig(), optimizer, **{"steps": 10, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": AdamWConfig(outer=OUTER, ema_decay=0.9)}, r"do not support optimizer\.ema_decay\. Remove it,"),
        (
            {"optimizer": AdamWConfig(outer=OUTER, skip_spikes=SpikeConfig(), offload=True)},
            r"optimizer\.skip_spikes and optimizer\.offload\. Remove them,",
        ),
        ({"transform": Identity()}, r"sections transform the model, such as lora, which replicas"),
        ({"schedule": schedule("1f1b", stages=2, microbatches=2, chunks=1)}, r"mesh\.stage is more than 1"),
        ({"objective": WithReference()}, r"the objective calls auxiliary models"),
        ({"precision": Precision(params="bfloat16")}, r"precision\.params is not float32"),
        ({"model": BIASED}, r"updates variables, such as the bias of a router"),
        ({"steps": 12}, r"run\.steps is 12, and the last 2 updates .*every 5 .*such as 15"),
    ],
)
def test_what_replicas_do_not_support_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        step_of(**changes)


def test_the_same_options_are_accepted_with_one_replica():
    one = dataclasses.replace(OUTER, replicas=1)
    assert (
        step_of(AdamWConfig(outer=one, ema_decay=0.9, skip_spikes=SpikeConfig()), model=BIASED, steps=12).outer is None
    )


def test_replicas_need_devices_of_their_own():
    with pytest.raises(
        ShardingError, match=r"replicas is 2, and mesh\.data is 1, which is not a multiple.*mesh\.data=2"
    ):
        Program(step_of(), make_mesh(MeshConfig(), jax.devices()[:1]))


def test_a_step_without_a_mesh_names_the_way_to_compile_it():
    step = step_of()
    state = jax.eval_shape(lambda: step.init({}, key=jax.random.key(0)))
    with pytest.raises(TrainingError, match=r"replicas=2 runs on the devices of each replica.*Program\(step, mesh\)"):
        jax.eval_shape(step, state, {"tokens": jax.ShapeDtypeStruct((4, 8), "int32")})


def test_an_optimizer_alone_refuses_replicas_instead_of_omitting_its_outer_steps():
    with pytest.raises(ConfigError, match=r"an optimizer alone has no replicas: train by make_step"):
        AdamWConfig(outer=OUTER).build(10, {"kernel": ("embed", "mlp")})


def test_rules_split_what_data_split_over_replicas_and_their_devices():
    rules = ShardingRules({"batch": ("data", "fsdp"), "embed": "fsdp", "mlp": None})
    across = across_replicas(rules)
    assert across.mesh_axes("batch") == ("replica", "data", "fsdp")
    assert across.mesh_axes("embed") == ("fsdp",) and across.mesh_axes("mlp") == ()
    assert within_replica(across) == rules
