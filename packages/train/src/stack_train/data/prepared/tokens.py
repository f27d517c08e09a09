"""One array of tokens in several files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

__all__ = ["ShardedTokens"]


class ShardedTokens:
    """The concatenation of memory-mapped arrays, of which only the pages of the tokens in use are read.

    `tokens[indices]` and `tokens[start:end]` return arrays, as for a single array.

    Args:
      shards: nonempty arrays [shard_tokens] of one dtype.
    """

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self.dtype = self._shards[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Shaped[np.ndarray, "..."]:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        index = np.asarray(index)
        which = np.searchsorted(self._ends, index, side="right")
        found = np.empty(index.shape, self.dtype)
        # A batch has tokens of a few shards only.
        for number in np.unique(which).tolist():
            is_in = which == number
            start = self._ends[number] - len(self._shards[number])
            found[is_in] = self._shards[number][index[is_in] - start]
        return found
