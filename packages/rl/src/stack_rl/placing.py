"""Placement of models that a run does not train on separate meshes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.abi.errors import ConfigError, ShardingError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh

__all__ = ["ShardedCheckpoint"]


class ShardedCheckpoint:
    """A `GenerativeCheckpoint` with its parameters on a mesh over the machine's last devices.

    An engine places later weights like the first ones, so weights from the trainer's mesh are transferred to this mesh.

    Args:
      checkpoint: checkpoint to place.
      mesh: mesh config; its sizes multiply to the number of devices, and an axis of -1 uses all devices.
      key: config key of the mesh, for messages.

    Attributes:
      whole: sharding of an array that is replicated on all devices of the mesh.

    Raises:
      ShardingError: the mesh has more devices than the machine.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, mesh: MeshConfig, key: str = "data.engine_mesh") -> None:
        devices, sizes = jax.local_devices(), mesh.sizes.values()
        count = len(devices) if -1 in sizes else math.prod(sizes)
        if count > len(devices):
            raise ShardingError(
                f"{key} has {count} devices; there are {len(devices)}. Lower its sizes, or leave it out."
            )
        self._checkpoint, self._mesh, self._key = checkpoint, make_mesh(mesh, devices[len(devices) - count :]), key
        self.whole = NamedSharding(self._mesh, PartitionSpec())
        # Copied, because protocol checks of Python 3.12 and later ignore attributes that `__getattr__` provides.
        held = [name for name in dir(checkpoint) if not name.startswith("_") and name != "load_params"]
        vars(self).update({name: getattr(checkpoint, name) for name in held})

    def load_params(self, shardings: Any = None) -> Any:
        """Loads the parameters onto the mesh.

        Raises:
          ConfigError: the engine places the parameters itself.
        """
        if shardings is not None:
            raise ConfigError(f"This engine places its parameters itself. Leave {self._key} out, or use 'static'.")
        return self._checkpoint.load_params(self._checkpoint.shardings(self._mesh))
