"""A policy on a mesh of its own; integration_tests/rollouts_on_eight_devices.py draws from one."""

import inspect

import jax
import pytest

from stack_core.abi.errors import ConfigError, ShardingError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_rl.placing import ShardedCheckpoint

from .scripted import Policy


class Loaded(Policy):
    """A policy that notes which shardings its parameters are loaded with."""

    def load_params(self, shardings: object = None) -> object:
        return shardings

    def shardings(self, mesh: object) -> object:
        return mesh


def test_its_parameters_lie_on_the_last_devices_and_all_else_is_the_policys() -> None:
    policy = Loaded()
    placed = ShardedCheckpoint(policy, MeshConfig(fsdp=1))
    assert placed.load_params().devices.flatten().tolist() == jax.devices()[-1:]
    assert placed.vocab_size == policy.vocab_size
    for name in GenerativeCheckpoint.__annotations__:
        inspect.getattr_static(placed, name)  # which protocols of later Pythons look up


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"data.engine_mesh has \d+ devices; there are"):
        ShardedCheckpoint(Loaded(), MeshConfig(fsdp=1, tensor=2 * len(jax.devices())))
    with pytest.raises(ConfigError, match="places its parameters itself"):
        ShardedCheckpoint(Loaded(), MeshConfig()).load_params("shardings")
