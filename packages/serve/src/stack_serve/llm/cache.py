"""The paged key-value cache: keys and values of all sequences lie in pages of pools that they share."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.contracts.caches import AttentionSpec, KeysValues, LayerState, Transition
from stack_core.errors import GenerationError
from stack_core.kv_cache import CODE_DTYPES, CodedVectors, coded
from stack_serve.llm.config import CacheType, PageLayout

__all__ = ["PagedKVCache", "PagedLayer", "Rows", "empty_layers"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedLayer:
    """The pools of keys and of values, [layers, ...] and the axes of the layout; one layer's lack the first axis.

    Attributes:
      key, value: arrays, or `CodedVectors`.
    """

    key: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The tokens of one step: row r computes the next `query_starts[r + 1] - query_starts[r]` tokens of a sequence.

    Attributes:
      block_tables: int32[rows, pages], the numbers of the pages of each row's sequence, in order.
      kv_lengths: int32[rows], tokens of each row's sequence, those of the step included.
      query_starts: int32[rows + 1], ascending from 0; tokens from the last on are padding.
      pages: int32[tokens], the page where each token's key goes; a number that no page has for padding.
      slots: int32[tokens], its slot there.
    """

    block_tables: Any
    kv_lengths: Any
    query_starts: Any
    pages: Any
    slots: Any


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "rows"], meta_fields=["layout"])
@dataclass(frozen=True)
class PagedKVCache:
    """A `KVCache` for tokens of many sequences at once, each a batch row of one token.

    A model that is called with tokens [tokens, 1] attends from each to the keys of its own sequence, those of the same
    step included.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023
    (arXiv:2309.06180).
    """

    layers: Any
    rows: Rows
    layout: PageLayout

    def attend(
        self,
        layer: PagedLayer,
        query: Float[Array, "tokens 1 heads key_dim"],
        key: Float[Array, "tokens 1 kv_heads key_dim"],
        value: Float[Array, "tokens 1 kv_heads value_dim"],
        spec: AttentionSpec,
        *,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "tokens 1 heads value_dim"], PagedLayer]:
        """Puts keys and values into their pages, and attends, in the dtype of pages that are not quantized."""
        layer = PagedLayer(self._put(layer.key, key[:, 0]), self._put(layer.value, value[:, 0]))
        pages = tuple("act_kv_heads" if axis == "h" else None for axis in self.layout)
        output: Any = ops.paged_attention(
            query[:, 0].astype(getattr(layer.key, "dtype", query.dtype)),
            layer.key,
            layer.value,
            block_tables=self.rows.block_tables,
            kv_lengths=self.rows.kv_lengths,
            query_starts=self.rows.query_starts,
            window=spec.window,
            softcap=spec.softcap,
            scale=spec.scale,
            layout=self.layout,
            sinks=sinks,
            axes={"query": (None, "act_heads", None), "key_pages": pages, "value_pages": pages},
        )
        return output[:, None].astype(query.dtype), layer

    def attend_latent(
        self, layer: Any, query: jax.Array, latent: jax.Array, spec: AttentionSpec, *, value_dim: int
    ) -> tuple[jax.Array, Any]:
        """Raises: pages hold keys and values; `empty_layers` refuses such models before."""
        raise GenerationError(_NO_PAGES.format("Latent"))

    def recur(self, layer: Any, transition: Transition, *inputs: jax.Array) -> tuple[Any, Any]:
        """Raises: pages hold keys and values; `empty_layers` refuses such models before."""
        raise GenerationError(_NO_PAGES.format("Recurrent"))

    def advance(self, layers: Any, tokens: int) -> "PagedKVCache":
        """The cache after all layers; how many tokens a sequence has is the host's to know."""
        return replace(self, layers=layers)

    def _put(self, pool: Any, new: jax.Array) -> Any:
        update = coded(new, pool.codes.dtype) if isinstance(pool, CodedVectors) else new.astype(pool.dtype)
        return jax.tree.map(self._write, pool, update)

    def _write(self, pool: jax.Array, new: jax.Array) -> jax.Array:
        places = {"p": self.rows.pages, "s": self.rows.slots}
        index = tuple(places.get(axis, slice(None)) for axis in self.layout)
        if self.layout == "hpsd":  # neighbouring index arrays leave their axis where it is, behind the heads
            new = new.swapaxes(0, 1)
        return pool.at[index].set(new, mode="drop")


_NO_PAGES = (
    "A layer keeps a state of the kind {}; pages hold keys and values alone. Generate with `stack generate`, whose "
    "cache holds every kind."
)


def empty_layers(states: Any, *, pages: int, page_tokens: int, layout: PageLayout, dtype: CacheType = "model") -> Any:
    """Pools of `pages` pages for all layers, all zero, in the structure of a model's `states`.

    Raises:
      GenerationError: a layer keeps something else than keys and values.
    """

    def pool(state: KeysValues, features: int) -> Any:
        sizes = {"p": pages, "s": page_tokens, "h": state.kv_heads, "d": features}
        axes = (state.repeats, *(sizes[axis] for axis in layout))
        if dtype in CODE_DTYPES:
            return CodedVectors(jnp.zeros(axes, CODE_DTYPES[dtype]), jnp.ones((*axes[:-1], 1), jnp.float32))
        return jnp.zeros(axes, _held_dtype(state.dtype) if dtype == "model" else dtype)

    def layer(state: LayerState) -> PagedLayer:
        if not isinstance(state, KeysValues):
            raise GenerationError(_NO_PAGES.format(type(state).__name__))
        return PagedLayer(pool(state, state.key_dim), pool(state, state.value_dim))

    return jax.tree.map(layer, states)


def _held_dtype(dtype: str) -> str:
    """What keys and values that a model computes in `dtype` are held in.

    On CPUs jax 0.10 widens a whole pool of bfloat16 in each step that writes to it, and rounds all of it again: 30
    times the time of a step.
    """
    widened = dtype == "bfloat16" and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)
    return "float32" if widened else dtype
