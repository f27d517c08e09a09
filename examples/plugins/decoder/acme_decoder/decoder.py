"""`model: {name: decoder}`: a small transformer with attention and a cache, which trains, generates and serves."""

from types import SimpleNamespace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues
from stack_core.abi.config import config
from stack_core.abi.models import Outputs
from stack_core.ops import Head


@config
class DecoderConfig:
    vocab_size: int
    name: Literal["decoder"] = "decoder"
    layers: int = 2
    heads: int = 2
    head_dim: int = 16
    max_positions: int = 1024
    dtype: str = "float32"
    param_dtype: str = "float32"


class Block(nnx.Module):
    def __init__(self, config, rngs):
        width = config.heads * config.head_dim
        self.heads, self.norm = config.heads, nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x, positions, segment_ids, cache, layer):
        parts = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3 * self.heads, -1)
        query, key, value = jnp.split(parts, 3, axis=2)
        query, key = ops.rope(query, positions), ops.rope(key, positions)
        if cache is None:
            mixed = ops.attention(query, key, value, causal=True, segment_ids=segment_ids)
        else:
            mixed, layer = cache.attend(layer, query, key, value, AttentionSpec())
        return x + self.output(mixed.reshape(x.shape)), layer


class Decoder(nnx.Module):
    """A `LanguageModel`. Cached arrays have a leading axis [repeats] of size 1, which a layer indexes with [0]."""

    def __init__(self, config, rngs):
        width = config.heads * config.head_dim
        sizes = {"kv_heads": config.heads, "key_dim": config.head_dim, "value_dim": config.head_dim}
        self.states = nnx.static([KeysValues(repeats=1, dtype=config.dtype, **sizes)] * config.layers)
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.lm_head = nnx.Linear(width, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, segment_ids=None, cache=None):
        x, layers = self.embed(tokens), []
        for place, block in enumerate(self.blocks):
            layer = None if cache is None else jax.tree.map(lambda held: held[0], cache.layers[place])
            x, layer = block(x, positions, segment_ids, cache, layer)
            layers.append(jax.tree.map(lambda held: held[None], layer))
        return Outputs(x, None if cache is None else cache.advance(layers, tokens.shape[1]))

    def head(self):
        return Head(self.lm_head.kernel.get_value())

    def logits(self, hidden):
        return self.head().logits(hidden)


def build(config, *, key):
    return Decoder(config, nnx.Rngs(key))


FAMILY = SimpleNamespace(name="decoder", config_class=DecoderConfig, build=build)
