"""`data: {name: bytes, path: FILE}`: randomly sampled windows of a file; each byte is a token."""

from typing import Literal

import jax
import numpy as np

from stack_core.abi.config import config
from stack_core.abi.data import Batches
from stack_core.abi.errors import ConfigError


@config
class ByteData:
    path: str
    name: Literal["bytes"] = "bytes"
    batch_size: int = 2
    seq_tokens: int = 16

    def spec(self, model):
        struct = jax.ShapeDtypeStruct((self.batch_size, self.seq_tokens), np.int32)
        return dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), struct)

    def work(self):
        return "bytes", self.batch_size * self.seq_tokens

    def check(self, model):
        if model.vocab_size < 256:
            raise ConfigError(f"model.vocab_size={model.vocab_size} is less than 256, the number of byte values.")

    def build(self, *, seed, model):
        return Windows(self, seed)


class Windows(Batches):
    """The data and its only iterator: batch i is a function of (seed, i)."""

    def __init__(self, settings, seed):
        self._settings, self._seed, self._taken = settings, seed, 0
        self._bytes = np.fromfile(settings.path, np.uint8).astype(np.int32)

    def train_iterator(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        rows, length = self._settings.batch_size, self._settings.seq_tokens
        starts = np.random.default_rng([self._seed, self._taken]).integers(len(self._bytes) - length, size=(rows, 1))
        windows, self._taken = self._bytes[starts + np.arange(length + 1)], self._taken + 1
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return {
            "tokens": windows[:, :-1],
            "targets": windows[:, 1:],
            "positions": positions,
            "segment_ids": np.ones_like(positions),
        }

    def get_state(self):
        return {"batches": self._taken}

    def set_state(self, state):
        self._taken = state["batches"]
