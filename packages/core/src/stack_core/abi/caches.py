"""The state that models keep of earlier tokens: kinds of state, and protocols of the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import jax

__all__ = ["AttentionSpec", "CacheStorage", "KVCache", "KeysValues", "Latent", "LayerState", "Recurrent", "Transition"]


@dataclass(frozen=True)
class AttentionSpec:
    """The static attributes of one attention layer that caches need; see `ops.attention`.

    Attributes:
      window: (left, right) window of visible tokens, or None.
      softcap: soft cap of the attention logits, or None.
      scale: factor of the attention logits; None is the default of `ops.attention`.
      chunk: number of consecutive positions, from 0 on, that attend only to each other; None has no chunks. The window
        of such a layer is (chunk - 1, 0).
    """

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """State of attention with keys and values: per token, arrays [kv_heads, key_dim] and [kv_heads, value_dim].

    Attributes:
      repeats: number of layers stacked in the leading axis.
      kv_heads: number of key/value heads.
      key_dim: features per key.
      value_dim: features per value.
      dtype: dtype of both arrays.
      window: number of tokens visible to a query, itself included; older ones may be dropped. None means all.
      chunk: see `AttentionSpec`.
    """

    repeats: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """State of attention with one vector [dim] per token; its first `value_dim` features are the value.

    A positive `index_dim` stores the token's key [index_dim] of an indexer, too; see `KVCache.attend_latent`.
    Source: DeepSeek-AI, DeepSeek-V2, 2024 (arXiv:2405.04434).
    """

    repeats: int
    dim: int
    value_dim: int
    dtype: str
    index_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """State of a recurrent layer, whose size does not depend on the number of tokens.

    Attributes:
      repeats: number of layers stacked in the leading axis.
      shapes: shapes of the state's arrays for one sequence; caches prepend [repeats, batch].
      dtypes: dtype of each array.
    """

    repeats: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


LayerState: TypeAlias = KeysValues | Latent | Recurrent

CacheStorage = Literal["model", "int8", "fp8_e4m3", "fp8_e5m2"]
"""Storage of keys and values in a cache: the model's dtype, or 8-bit codes with one scale per token and head."""

Transition: TypeAlias = Callable[..., tuple[Any, Any]]
"""`(state, valid, *inputs) -> (output, state)`; tokens outside of the mask valid, bool[batch, seq], leave the state."""


@runtime_checkable
class KVCache(Protocol):
    """The state of all layers for earlier tokens, a pytree; it replaces `ops.attention` inside a model.

    A model calls the method for its layer's kind with that layer's slice of `layers`, and `advance` once at the end.

    Attributes:
      layers: pytree whose leaves have a leading [repeats, ...] axis, which the model scans over.
    """

    layers: Any

    def attend(
        self,
        layer: Any,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        spec: AttentionSpec,
        *,
        sinks: jax.Array | None = None,
        ahead: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Appends the call's keys and values to the layer, then attends to all tokens of the layer.

        Args:
          query: [batch, seq, heads, key_dim].
          key: [batch, seq, kv_heads, key_dim].
          value: [batch, seq, kv_heads, value_dim].
          sinks: [heads], see `ops.attention`.
          ahead: [batch, seq], see `ImageTokens`; passed only in calls with images.

        Returns:
          Output [batch, seq, heads, value_dim], and the layer with the new tokens.
        """
        ...

    def attend_shared(
        self,
        layer: Any,
        query: jax.Array,
        spec: AttentionSpec,
        *,
        sinks: jax.Array | None = None,
        ahead: jax.Array | None = None,
    ) -> jax.Array:
        """Attends to the tokens of another layer, to which the same call has already appended its keys and values.

        Args:
          layer: the slice that `attend` returned for that layer.
          query, sinks, ahead: see `attend`.

        Returns:
          Output [batch, seq, heads, value_dim].
        """
        ...

    def attend_latent(
        self, layer: Any, query: jax.Array, latent: jax.Array, spec: AttentionSpec, *, value_dim: int, index: Any = None
    ) -> tuple[jax.Array, Any]:
        """Appends latent[batch, seq, dim], then attends to all latents, the keys and values of every head.

        Args:
          query: [batch, seq, heads, dim].
          index: `KeySelection` of the call's tokens, by which each query selects the latents that it attends to;
            passed only by layers with an `index_dim`. Its keys are appended, too.

        Returns:
          Output [batch, seq, heads, value_dim], and the layer with the new tokens.
        """
        ...

    def recur(self, layer: Any, transition: Transition, *inputs: jax.Array) -> tuple[Any, Any]:
        """Runs a recurrence over the call's tokens, starting from the layer's state.

        Args:
          inputs: arrays [batch, seq, ...] for `transition`.

        Returns:
          The transition's output, and the layer with the state after the last valid token.
        """
        ...

    def advance(self, layers: Any, tokens: int) -> KVCache:
        """Returns the cache after all layers have appended `tokens` tokens per row."""
        ...
