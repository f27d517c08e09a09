"""What a model keeps of the tokens that it has seen: the kinds of state, and the caches that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import jax

__all__ = [
    "AttentionSpec",
    "CacheStorage",
    "KVCache",
    "KeysValues",
    "Latent",
    "LayerState",
    "Recurrent",
    "Transition",
]


@dataclass(frozen=True)
class AttentionSpec:
    """The static attributes of one attention layer, as a cache needs them; see `ops.attention`."""

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class KeysValues:
    """Attention that keeps keys and values: of each token, arrays [kv_heads, key_dim] and [kv_heads, value_dim].

    Attributes:
      repeats: layers stacked in the leading axis.
      window: tokens that a query sees, itself included; older ones need not be kept. None sees all.
    """

    repeats: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention over one vector [dim] of each token; values are its first `value_dim` features.

    Source: DeepSeek-AI, DeepSeek-V2, 2024 (arXiv:2405.04434).
    """

    repeats: int
    dim: int
    value_dim: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """A layer whose state has one size however many tokens it has seen.

    Attributes:
      shapes: of the state's arrays, one sequence's: the caches add [repeats, batch].
      dtypes: of each.
    """

    repeats: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


LayerState: TypeAlias = KeysValues | Latent | Recurrent

CacheStorage = Literal["model", "int8", "fp8_e4m3", "fp8_e5m2"]
"""How a cache holds keys and values: in the model's dtype, or as codes with a scale for each token and head."""

Transition: TypeAlias = Callable[..., tuple[Any, Any]]
"""`(state, valid, *inputs) -> (output, state)`; valid is bool[batch, seq], and what is not valid moves no state."""


@runtime_checkable
class KVCache(Protocol):
    """What layers keep of earlier tokens, a pytree; stands in for `ops.attention` inside a model.

    A model calls the method of its layer's kind with that layer's slice of `layers`, and `advance` once at the end.

    Attributes:
      layers: a pytree whose leaves lead with a [repeats, ...] axis, which the model scans over.
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
    ) -> tuple[jax.Array, Any]:
        """Appends key[batch, seq, kv_heads, key_dim] and value[batch, seq, kv_heads, value_dim], and attends to all.

        Args:
          query: [batch, seq, heads, key_dim].
          sinks: [heads], see `ops.attention`.

        Returns:
          Output [batch, seq, heads, value_dim], and the layer with the new tokens.
        """
        ...

    def attend_latent(
        self, layer: Any, query: jax.Array, latent: jax.Array, spec: AttentionSpec, *, value_dim: int
    ) -> tuple[jax.Array, Any]:
        """Appends latent[batch, seq, dim] and attends to all latents, which are keys and values of every head.

        Args:
          query: [batch, seq, heads, dim].

        Returns:
          Output [batch, seq, heads, value_dim], and the layer with the new tokens.
        """
        ...

    def recur(self, layer: Any, transition: Transition, *inputs: jax.Array) -> tuple[Any, Any]:
        """Runs a recurrence over the call's tokens from the layer's state.

        Args:
          inputs: arrays [batch, seq, ...] that `transition` takes.

        Returns:
          The transition's output, and the layer with the state behind the last valid token.
        """
        ...

    def advance(self, layers: Any, tokens: int) -> KVCache:
        """The cache after all layers appended `tokens` tokens a row."""
        ...
