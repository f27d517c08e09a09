"""Array transfers between processes of different JAX worlds, by `jax.experimental.transfer`.

Its sockets are neither authenticated nor encrypted; they listen only at the address that the cluster uses.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

__all__ = ["Transfers"]


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

    def pull(self, address: str, key: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Pulls the array offered under a key by the process at an address; it must have this shape and dtype.

        Raises:
          jax.errors.JaxRuntimeError: the process is gone.
        """
        if address not in self._connections:
            self._connections[address] = self._started().connect(address)
        place = SingleDeviceSharding(jax.local_devices()[0])
        [array] = self._connections[address].pull(key, [jax.ShapeDtypeStruct(shape, dtype, sharding=place)])
        return np.asarray(array)

    def _started(self) -> Any:
        if self._server is None:
            from jax.experimental import transfer  # some builds of jaxlib lack it

            here = f"{self._host}:0"
            client = jax.local_devices()[0].client
            self._server = transfer.start_transfer_server(client, here, [here])
        return self._server
