"""Engines of rollouts in another process."""

from functools import partial
from typing import Any

from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.runtime.config import EngineProcessConfig
from stack_rl.placing import ShardedCheckpoint

__all__ = ["open_in_process"]


def open_in_process(
    name: str, policy: GenerativeCheckpoint, config: EngineProcessConfig, *, mesh: MeshConfig | None
) -> Engine:
    """Opens a policy with a registered engine in another process.

    Args:
      mesh: mesh of the policy's weights over the devices of that process; None is its first device.

    Raises:
      ClusterError: the process cannot start.
      StackError: the engine cannot be constructed.
    """
    # Imported here, because it imports the runtime of clusters, which only such runs need.
    from stack_core.runtime.engine_process import EngineProcess

    return EngineProcess(policy, partial(_open, name, mesh), config, name=name, mesh=mesh)


def _open(name: str, mesh: MeshConfig | None, policy: GenerativeCheckpoint) -> Engine:
    """Constructs the engine, in its process."""
    placed: Any = policy if mesh is None else ShardedCheckpoint(policy, mesh)
    return checked_engine(name, registries.engines[name](placed))
