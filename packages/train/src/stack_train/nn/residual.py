"""The residual stream between layers and its sharding."""

from dataclasses import dataclass
from typing import Any, Final

import jax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes, constrain

__all__ = ["STREAM", "Hidden", "Norm", "NormedSum", "ResidualStream", "Rows", "gather_sequence", "shard_residual"]

Hidden = Float[Array, "batch seq embed"]

STREAM: Final = ("batch", "norm_seq", "act_embed")
"""Logical axes of the residual stream outside of layers, where only norms and sums use it."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The RMS norm y = (scale + offset) x / sqrt(mean(x^2) + epsilon).

    Attributes:
      epsilon: term added to the mean square.
      offset: offset of stored scales, 1 for families with zero-initialized scales.
    """

    epsilon: float = 1e-6
    offset: float = 0.0

    def __call__(
        self, x: Float[Array, "... features"], scale: Any, axes: LogicalAxes | None = None
    ) -> Float[Array, "... features"]:
        """Normalizes the last axis of `x`, whose logical axes are `axes`."""
        names = None if axes is None else {"x": axes}
        normed: Any = ops.norm(x, scale[...], epsilon=self.epsilon, scale_offset=self.offset, axes=names)
        return normed


@dataclass(frozen=True, kw_only=True)
class NormedSum:
    """The residual sum y = alpha n + beta f(n), n = norm(x), which adds to a sublayer's normalized input.

    Source: Wang et al., DeepNet, 2022 (arXiv:2203.00555), in the variant of MiniMax-01.

    Attributes:
      alpha: weight of the normalized input n.
      beta: weight of the sublayer's output f(n).
    """

    alpha: float
    beta: float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Positions and segments of a batch's tokens, shared by all layers.

    Attributes:
      positions: [batch, seq], position of each token in its document.
      segment_ids: [batch, seq], segment of each token, 0 for padding; tokens attend only within their segment, whose
        tokens are adjacent. None for rows of one segment.
      ahead: [batch, seq], number of tokens after each token that it attends to, the rest of its image; None without
        images. See `stack_core.abi.models.ImageTokens`.
      coordinates: [batch, seq, axes], positions for rotary embeddings with several axes; None if all equal `positions`.
      shared: keys and values that later layers share, by index of the layer that computed them: two arrays [batch,
        seq, kv_heads, head_dim], or a slice of the cache. None without shared keys.
      experts: [batch, seq, active], experts of each token that this layer's mixture replays; see `route`. Set for each
        layer. None leaves the choice to the router.
      layer: index of the layer in the model; None for mixers without an index.
      tokens: [batch, seq], token ids, for mixtures that choose experts by a table; None without such a mixture.
    """

    positions: Int[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"] | None
    ahead: Int[Array, "batch seq"] | None = None
    coordinates: Int[Array, "batch seq axes"] | None = None
    shared: dict[int, Any] | None = None
    experts: Int[Array, "batch seq active"] | None = None
    layer: Int[Array, ""] | None = None
    tokens: Int[Array, "batch seq"] | None = None

    @property
    def segments(self) -> ops.PackedSegments | None:
        """Argument `segment_ids` of `ops.attention`."""
        return None if self.segment_ids is None else ops.PackedSegments.of(self.segment_ids)

    @property
    def rotary(self) -> Int[Array, "batch seq *axes"]:
        """Positions for rotary embeddings."""
        return self.positions if self.coordinates is None else self.coordinates


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualStream:
    """The residual stream between two layers, whose last sum is computed together with the next norm.

    Attributes:
      x: residual stream before the last layer, [batch, seq, embed].
      added: output of the last layer, with the shape of `x`; None once it is added to `x`.
    """

    x: Any
    added: Any

    def normed(self, norm: Norm, scale: Any) -> tuple[Any, Any]:
        """Returns the RMS norm of the sum, and the sum."""
        if self.added is None:
            return norm(self.x, scale, STREAM), self.x
        options: Any = {"epsilon": norm.epsilon, "scale_offset": norm.offset, "axes": {"x": STREAM}}
        normed, x = ops.norm(self.added, scale[...], residual=self.x, **options)
        return normed, x

    def joined(self) -> "ResidualStream":
        """Computes the sum, which takes half the memory of its two terms."""
        return self if self.added is None else ResidualStream(self.x + self.added, None)


def shard_residual(x: Hidden) -> Hidden:
    """Shards activations like the residual stream, for norms and sums.

    If the sharding rules split the sequence over `tensor`, the sum of partial products over `tensor` becomes a
    reduce-scatter. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198).
    """
    return constrain(x, *STREAM, name="the residual stream")


def gather_sequence(x: Hidden) -> Hidden:
    """Shards activations for products and attention, with the complete sequence on each device of `tensor`."""
    return constrain(x, "batch", "seq", "act_embed", name="normed activations")
