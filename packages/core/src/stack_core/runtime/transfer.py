"""Array transfers between processes of different JAX worlds, by `jax.experimental.transfer`.

Its sockets are neither authenticated nor encrypted; they listen only at the address that the cluster uses.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

__all__ = ["Index", "Transfers", "overlap", "owned_parts", "plain_index"]

Index: TypeAlias = tuple[tuple[int, int], ...]
"""A part of an array: (start, stop) for each axis."""


class Transfers:
    """A server for this process's arrays and a client for other processes' arrays; it starts on first use.

    Args:
      host: listening address on this machine.
    """

    def __init__(self, host: str) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._server: Any = None
        self._connections: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """The address from which others pull."""
        return self._started().address()

    def offer(self, key: int, array: jax.Array) -> None:
        """Holds an array on one device until another process pulls it, once, by its key."""
        self._started().await_pull(key, [array])

    def pull(self, address: str, key: int, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Pulls the array offered under a key by the process at an address, to the first device.

        Shape and dtype must be the offered array's.

        Raises:
          jax.errors.JaxRuntimeError: the process is gone.
        """
        if address not in self._connections:
            self._connections[address] = self._started().connect(address)
        place = SingleDeviceSharding(jax.local_devices()[0])
        [array] = self._connections[address].pull(key, [jax.ShapeDtypeStruct(shape, dtype, sharding=place)])
        return array

    def _started(self) -> Any:
        if self._server is None:
            from jax.experimental import transfer  # some builds of jaxlib lack it

            here = f"{self._host}:0"
            client = jax.local_devices()[0].client
            self._server = transfer.start_transfer_server(client, here, [here])
        return self._server


def owned_parts(array: jax.Array) -> dict[Index, jax.Array]:
    """Returns the parts of an array for which this process holds the first replica, each on one device."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return {plain_index(shard.index, array.shape): shard.data for shard in shards}


def plain_index(index: Sequence[slice], shape: tuple[int, ...]) -> Index:
    """Converts an index of slices to numbers."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(one: Index, other: Index) -> bool:
    """Returns whether two parts of an array share an element."""
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
