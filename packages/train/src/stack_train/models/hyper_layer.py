"""Decoder layers with several residual streams."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from stack_core.abi.caches import KVCache
from stack_train.models.decoder import Block, Layer
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Facts
from stack_train.nn.hyper_connections import HyperConnections
from stack_train.nn.residual import STREAM, ResidualStream, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import named

__all__ = ["HyperBlock", "HyperLayer"]


@dataclass(frozen=True, kw_only=True)
class HyperLayer(Layer):
    """A decoder layer whose attention and feed-forward layer each have `HyperConnections` in place of a residual sum.

    It has both sublayers with norms of their inputs, and no other option of `Layer`.

    Attributes:
      connections: the residual streams, which lie side by side in the stream of the decoder, [batch, seq, streams *
        embed].
    """

    connections: HyperConnections

    def build(self, build: Build) -> "HyperBlock":
        return HyperBlock(self, build)


class HyperBlock(Block):
    """Module of a `HyperLayer`."""

    def __init__(self, spec: HyperLayer, build: Build) -> None:
        super().__init__(spec, build)
        self.attention_streams = spec.connections.build(build.child())
        self.feed_forward_streams = spec.connections.build(build.child())

    def __call__(
        self, stream: ResidualStream, rows: Rows, cache: KVCache | None, layer_cache: Any, per_layer_input: Any = None
    ) -> tuple[ResidualStream, Any, Facts]:
        del per_layer_input
        x = named(stream.joined().x, "layer_input")
        read, weights = self.attention_streams.read(x)
        normed = gather_sequence(self.norm(read, self.attention_norm, STREAM))
        output, layer_cache = self.attention(normed, rows, cache, layer_cache)
        output = shard_residual(named(output, "attention_output"))
        x = shard_residual(self.attention_streams.write(x, output, weights))
        read, weights = self.feed_forward_streams.read(x)
        normed = gather_sequence(self.norm(read, self.feed_forward_norm, STREAM))
        output, facts = self.feed_forward(normed, rows)
        if cache is None:  # only generation reports the experts of each token
            facts.pop("experts", None)
        x = shard_residual(self.feed_forward_streams.write(x, shard_residual(output), weights))
        # A scan's carry keeps its structure, which has two terms with a cache.
        added = None if stream.added is None else jnp.zeros_like(x)
        return replace(stream, x=x, added=added), layer_cache, facts
