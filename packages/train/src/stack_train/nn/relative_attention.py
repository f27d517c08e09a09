"""Attention whose scores have no scale and have a learned bias for each distance, as in T5.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683), section 2.1.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.caches import AttentionSpec
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import LogicalAxes, constrain
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.nn.build import Build
from stack_train.nn.linear import take_rows
from stack_train.nn.residual import Hidden

__all__ = ["RelativeAttention", "RelativePositions", "SplitHeads", "bias_of"]

SplitHeads = Float[Array, "batch seq heads head_dim"]

_HEADS: Final[LogicalAxes] = ("batch", "seq", "act_heads", None)
_AXES: Final[dict[str, LogicalAxes]] = {"query": _HEADS, "key": _HEADS, "value": _HEADS}
_BIAS: Final[LogicalAxes] = (None, "act_heads", None, None)
_SPEC: Final = AttentionSpec(scale=1.0)


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """Buckets of distances between queries and keys. Each bucket has one learned bias per head.

    Short distances have a bucket each. Longer distances share buckets, whose widths grow with the distance.

    Attributes:
      buckets: number of buckets.
      max_distance: distance in tokens from which all distances share a bucket.
      bidirectional: uses half of the buckets for keys after the query. Otherwise these keys have the bucket of
        distance 0.
    """

    buckets: int
    max_distance: int
    bidirectional: bool

    def __post_init__(self) -> None:
        if self._near < 1 or self.max_distance <= self._near:
            raise ConfigError(
                f"buckets={self.buckets} give the nearest {self._near} distances a bucket each, and max_distance is "
                f"{self.max_distance}. Set buckets to 4 or more, and max_distance above {max(self._near, 1)}."
            )

    def __call__(
        self, queries: Int[Array, "#batch q_seq"], keys: Int[Array, "#batch kv_seq"]
    ) -> Int[Array, "#batch q_seq kv_seq"]:
        """Returns the bucket of each query and key, from their positions."""
        after = keys[:, None, :] - queries[:, :, None]
        distance = jnp.abs(after) if self.bidirectional else jnp.maximum(-after, 0)
        found = jnp.asarray(self._by_distance)[jnp.minimum(distance, self.max_distance)]
        return jnp.where(after > 0, found + self._side, found) if self.bidirectional else found

    @property
    def _side(self) -> int:
        """Number of buckets for keys on one side of the query."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def _near(self) -> int:
        """Number of distances with a bucket each."""
        return self._side // 2

    @property
    def _by_distance(self) -> Int[np.ndarray, " distances"]:
        """Buckets of the distances 0 to `max_distance`."""
        near, side = self._near, self._side
        distance = np.arange(self.max_distance + 1)
        # float32 as in transformers, because rounding decides the bucket of some distances.
        grown = np.log(np.maximum(distance, 1).astype(np.float32) / near) / math.log(self.max_distance / near)
        shared = near + (grown * (side - near)).astype(np.int32)
        return np.where(distance < near, distance, np.minimum(shared, side - 1)).astype(np.int32)


def bias_of(
    table: Float[Array, "buckets heads"], buckets: Int[Array, "#batch q_seq kv_seq"], dtype: Any
) -> Float[Array, "#batch heads q_seq kv_seq"]:
    """Returns the biases of scores from a table with one bias per bucket and head."""
    bias = take_rows(table, buckets).astype(dtype).transpose(0, 3, 1, 2)
    return constrain(bias, *_BIAS, name="position biases")


class RelativeAttention(nnx.Module):
    """y = softmax(x Q k^T + bias) v O, with keys k and values v from `keys_values`.

    The initial values of Q include the factor head_dim ** -0.5 that the scores lack.
    """

    def __init__(self, heads: int, head_dim: int, build: Build) -> None:
        embed, inner, self.heads = build.embed, heads * head_dim, heads
        self.query = replace(build.child(), std=build.std * head_dim**-0.5).linear((embed, inner), ("embed", "heads"))
        self.key = build.linear((embed, inner), ("embed", "heads"))
        self.value = build.linear((embed, inner), ("embed", "heads"))
        self.output = build.linear((inner, embed), ("heads", "embed"), residual=True)

    def keys_values(self, x: Hidden) -> tuple[SplitHeads, SplitHeads]:
        """Projects the attended tokens."""
        return self._split(self.key(x)), self._split(self.value(x))

    def __call__(self, x: Hidden, key: jax.Array, value: jax.Array, **options: Any) -> Hidden:
        """Attends from `x` to keys and values, [batch, kv_seq, heads, head_dim].

        Args:
          options: other arguments of `ops.attention`, such as `bias`.
        """
        axes = _AXES if options.get("bias") is None else {**_AXES, "bias": _BIAS}
        attended: Any = ops.attention(self._split(self.query(x)), key, value, scale=1.0, axes=axes, **options)
        return self.output(attended.reshape(*x.shape[:2], -1))

    def attend_cached(
        self, x: Hidden, cache: DenseKVCache, layer_cache: Any, *, bias: Float[Array, "#batch heads seq keys"]
    ) -> tuple[Hidden, Any]:
        """Attends to the tokens of a cache and the call's own tokens; returns the output and the extended layer."""
        attended, layer_cache = cache.attend(
            layer_cache, self._split(self.query(x)), *self.keys_values(x), _SPEC, bias=bias
        )
        return self.output(attended.reshape(*x.shape[:2], -1)), layer_cache

    def _split(self, x: Hidden) -> SplitHeads:
        return constrain(x.reshape(*x.shape[:2], self.heads, -1), *_HEADS, name="heads")
