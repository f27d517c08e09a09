"""`stack serve table:DIR`: a directory with `table.npy`, float32[256, 256], the logits of the next byte by byte."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import ConversionError
from stack_core.abi.models import Outputs
from stack_core.ops import Head


class Bytes:
    """A `Tokenizer` whose tokens are bytes."""

    vocab_size, eos_id, bos_id = 256, 0, None

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def encode_batch(self, texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token])

    def save(self, directory):
        pass


@dataclass
class Table:
    """A `LanguageModel` without states: its output depends only on the last token."""

    weight: jax.Array
    states = ()

    def __call__(self, tokens, positions, segment_ids=None, cache=None):
        hidden = jax.nn.one_hot(tokens, 256, dtype=self.weight.dtype)
        return Outputs(hidden, None if cache is None else cache.advance(cache.layers, tokens.shape[1]))

    def head(self):
        return Head(self.weight)

    def logits(self, hidden):
        return self.head().logits(hidden)


@dataclass
class TableCheckpoint:
    """A `GenerativeCheckpoint`, the interface of a model to engines."""

    path: object
    name: str
    states = ()
    vocab_size, max_positions, tokenizer, end_tokens = 256, 4096, Bytes(), frozenset({0})
    chat_template, special_tokens, sampling_defaults = None, {}, {}
    parameters: dict = field(default_factory=lambda: {"table": jax.ShapeDtypeStruct((256, 256), jnp.float32)})

    def load_params(self, shardings=None):
        return {"table": jax.device_put(np.load(self.path), shardings and shardings["table"])}

    def model(self, params):
        return Table(params["table"])

    def shardings(self, mesh):
        return {"table": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}


def open_for_generation(directory):
    path = directory / "table.npy"
    if not path.is_file():
        raise ConversionError(f"{directory} has no table.npy. Expected the directory of a table.")
    return TableCheckpoint(path, directory.resolve().name)


FORMAT = SimpleNamespace(
    recognizes=lambda directory: (directory / "table.npy").is_file(), open_for_generation=open_for_generation
)
