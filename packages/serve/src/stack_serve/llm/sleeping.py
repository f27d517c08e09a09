"""Release of an engine's device memory while it sleeps."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["HostWeights", "delete_arrays"]


@dataclass(frozen=True)
class HostWeights:
    """A copy of device arrays in host memory.

    Attributes:
      arrays: NumPy arrays, in the structure of the device arrays.
      shardings: sharding of each device array.
    """

    arrays: Any
    shardings: Any

    @classmethod
    def of(cls, tree: Any) -> "HostWeights":
        """Copies arrays from the devices."""
        return cls(jax.tree.map(np.asarray, tree), jax.tree.map(lambda array: array.sharding, tree))

    def restored(self) -> Any:
        """Copies the arrays back to their devices."""
        return jax.tree.map(jax.device_put, self.arrays, self.shardings)


def delete_arrays(tree: Any) -> None:
    """Frees the memory of device arrays; the caller must not use them again."""
    for array in jax.tree.leaves(tree):
        array.delete()
