"""Weights that the engines of a server share, kept for engines that start again."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stack_serve.llm.new_weights import leaves_by_path

__all__ = ["SharedWeights"]


@dataclass(frozen=True)
class SharedWeights:
    """Weights of all engines, as updates of those of the checkpoint.

    Attributes:
      version: version of the weights, which their tokens carry.
      updates: number of updates so far; unlike the version, it never repeats.
      changed: parameters that differ from the checkpoint, as host copies that are applied in order.
    """

    version: int = 0
    updates: int = 0
    changed: tuple[Any, ...] = ()

    def updated(self, params: Any, version: int | None) -> "SharedWeights":
        """Returns the weights after an update.

        Args:
          params: all or some of the parameters, which are copied.
          version: version of the result; None increments the current one.
        """
        paths = leaves_by_path(params).keys()
        kept = tuple(tree for tree in self.changed if not leaves_by_path(tree).keys() <= paths)
        # A copy: the caller may delete or donate its arrays, of which `np.asarray` may be a view.
        copies = jax.tree.map(np.array, params)
        number = self.version + 1 if version is None else version
        return SharedWeights(number, self.updates + 1, (*kept, copies))

    def reset(self) -> "SharedWeights":
        """Returns the weights after the engines have read the checkpoint again, with the same version."""
        return SharedWeights(self.version, self.updates)
