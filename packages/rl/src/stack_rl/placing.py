"""Places models that a run does not train on separate meshes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.abi.errors import ConfigError, ShardingError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig, make_mesh

__all__ = ["PlacedModel"]


class PlacedModel:
    """A `GenerativeCheckpoint` whose parameters lie on a mesh over the last devices of the machine.

    An engine puts later weights where the first ones lie, so that weights of the trainer's mesh are sent from there to
    this one.

    Args:
      mesh: its sizes multiply to the number of devices; with an axis of -1 it has all.
      key: of the config, for messages.

    Attributes:
      whole: the sharding of an array that each of the mesh's devices holds all of.

    Raises:
      ShardingError: there are fewer devices.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, mesh: MeshConfig, key: str = "data.engine_mesh") -> None:
        devices, sizes = jax.devices(), mesh.sizes.values()
        count = len(devices) if -1 in sizes else math.prod(sizes)
        if count > len(devices):
            raise ShardingError(
                f"{key} has {count} devices; there are {len(devices)}. Lower its sizes, or leave it out."
            )
        self._checkpoint, self._mesh, self._key = checkpoint, make_mesh(mesh, devices[len(devices) - count :]), key
        self.whole = NamedSharding(self._mesh, PartitionSpec())
        # Held rather than looked up when asked for, which protocols of Python 3.12 and later do not see.
        held = [name for name in dir(checkpoint) if not name.startswith("_") and name != "load_params"]
        vars(self).update({name: getattr(checkpoint, name) for name in held})

    def load_params(self, shardings: Any = None) -> Any:
        """The parameters on the mesh.

        Raises:
          ConfigError: the engine places them itself.
        """
        if shardings is not None:
            raise ConfigError(f"This engine places its parameters itself. Leave {self._key} out, or use 'static'.")
        return self._checkpoint.load_params(self._checkpoint.shardings(self._mesh))
