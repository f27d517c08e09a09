"""`model: {name: bigram}`: predicts each token from its predecessor, with Flax's built-in layers."""

from types import SimpleNamespace
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from stack_core.abi.config import config
from stack_core.abi.models import Outputs
from stack_core.ops import Head


@config
class BigramConfig:
    vocab_size: int
    name: Literal["bigram"] = "bigram"
    width: int = 16
    max_positions: int = 1024
    dtype: str = "float32"
    param_dtype: str = "float32"


class Bigram(nnx.Module):
    """A `LanguageModel` without per-sequence state."""

    states = ()

    def __init__(self, config, rngs):
        self.embed = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.lm_head = nnx.Linear(config.width, config.vocab_size, rngs=rngs)

    def __call__(self, tokens, positions, segment_ids=None, cache=None):
        return Outputs(jnp.tanh(self.embed(tokens)), cache)

    def head(self):
        return Head(self.lm_head.kernel.get_value(), self.lm_head.bias.get_value())

    def logits(self, hidden):
        return self.head().logits(hidden)


def build(config, *, key):
    return Bigram(config, nnx.Rngs(key))


FAMILY = SimpleNamespace(name="bigram", config_class=BigramConfig, build=build)
