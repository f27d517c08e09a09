"""Paged cache: pools of pages with the keys, values and latents of all sequences.

A recurrent state has a fixed size, so it is stored in the slot of its running sequence instead of in pages. Sequences
with a common prefix can share pages but not states, because a state describes only the last token of its sequence.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues, Latent, LayerState, Recurrent, Transition
from stack_core.abi.errors import ConfigError
from stack_core.chips.context import target
from stack_core.ops.building import holds_values, stack_key_value
from stack_core.ops.kv_cache import CODE_DTYPES, CodedVectors, coded
from stack_core.ops.selection import KeySelection
from stack_serve.llm.config import ANY_LAYOUT, CacheType, PageLayout
from stack_serve.llm.selected_pages import attend_selected_pages

__all__ = [
    "HiddenStates",
    "LayoutPreferences",
    "PagedKVCache",
    "PagedLayer",
    "Rows",
    "SlotStates",
    "empty_layers",
    "supports_shared_pool",
]

_PIECE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """State with the model's last hidden state [dim] of each token, which is stored as a key of one head.

    Attributes:
      dim: width of the hidden states.
      dtype: dtype of the hidden states, which `EngineConfig.cache_dtype` does not change.
    """

    dim: int
    dtype: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedLayer:
    """Pools of keys and values, [layers, *layout]; pools of one layer lack the first axis.

    Attributes:
      key: array or `CodedVectors`. A pool of latents is stored as keys of one head.
      value: array or `CodedVectors`; None for latents, and in layouts that store the values next to the keys. Latents
        with an indexer have its keys here.
    """

    key: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotStates:
    """Recurrent states of each slot.

    Attributes:
      arrays: arrays [layers, slots, ...]; arrays of one layer lack the first axis.
    """

    arrays: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Tokens of one step: row r computes the next `query_starts[r + 1] - query_starts[r]` tokens of a sequence.

    Attributes:
      block_tables: int32[rows, pages], page numbers of each row's sequence in token order.
      kv_lengths: int32[rows], length of each row's sequence, including the tokens of this step.
      query_starts: int32[rows + 1], ascending from 0; tokens from `query_starts[-1]` on are padding.
      pages: int32[tokens], page to which each token's key is written; an out-of-range number for padding.
      slots: int32[tokens], position of the token in its page.
      sequences: int32[rows], slot of each row's sequence, which holds its recurrent states. Slots are unique, except
        the slot of padding rows.
    """

    block_tables: Any
    kv_lengths: Any
    query_starts: Any
    pages: Any
    slots: Any
    sequences: Any


# Compared by identity: as static data of a pytree it must be hashable while names are added.
@dataclass(eq=False)
class LayoutPreferences:
    """Preferred page layouts, collected from the attention calls of a traced step.

    Attributes:
      names: preferred layout of each call that has one.
      one_pool: True if every layer can store values in one pool with the keys.
    """

    names: list[str] = field(default_factory=list)
    one_pool: bool = True

    @property
    def best(self) -> PageLayout:
        """The layout preferred by most calls, among those that fit the model; `ANY_LAYOUT` without a preference."""
        names = Counter(name for name in self.names if self.one_pool or not holds_values(name))
        return cast(PageLayout, names.most_common(1)[0][0]) if names else ANY_LAYOUT


@partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "rows"], meta_fields=["layout", "single", "preferences"]
)
@dataclass(frozen=True)
class PagedKVCache:
    """A `KVCache` for tokens of many sequences, each a batch row of one token.

    In a model called with tokens [tokens, 1], each token attends to the keys of its own sequence, including keys that
    the same step computes.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023
    (arXiv:2309.06180).

    Attributes:
      layers: `PagedLayer`s and `SlotStates` in the structure of the model's states.
      rows: tokens of the step.
      layout: axis order of the page pools.
      single: True if every row has at most one token.
      preferences: collects the preferred layout of each attention call; None does not collect them.
    """

    layers: Any
    rows: Rows
    layout: PageLayout
    single: bool = False
    preferences: LayoutPreferences | None = None

    def attend(
        self,
        layer: PagedLayer,
        query: Float[Array, "tokens 1 heads key_dim"],
        key: Float[Array, "tokens 1 kv_heads key_dim"],
        value: Float[Array, "tokens 1 kv_heads value_dim"],
        spec: AttentionSpec,
        *,
        sinks: Float[Array, " heads"] | None = None,
        ahead: Int[Array, "tokens 1"] | None = None,
    ) -> tuple[Float[Array, "tokens 1 heads value_dim"], PagedLayer]:
        """Writes keys and values to their pages and computes attention, in the dtype of the pages unless quantized."""
        if holds_values(self.layout):
            layer = PagedLayer(self._put(layer.key, stack_key_value(key[:, 0], value[:, 0])), None)
        else:
            layer = PagedLayer(self._put(layer.key, key[:, 0]), self._put(layer.value, value[:, 0]))
        return self.attend_shared(layer, query, spec, sinks=sinks, ahead=ahead), layer

    def attend_shared(
        self,
        layer: PagedLayer,
        query: Float[Array, "tokens 1 heads key_dim"],
        spec: AttentionSpec,
        *,
        sinks: Float[Array, " heads"] | None = None,
        ahead: Int[Array, "tokens 1"] | None = None,
    ) -> Float[Array, "tokens 1 heads value_dim"]:
        """Computes attention over the pages of a layer, to which the same step has already written its tokens."""
        pages = tuple("act_kv_heads" if axis == "h" else None for axis in self.layout)
        axes = {"query": (None, "act_heads", None), "key_pages": pages}
        if layer.value is not None:
            axes["value_pages"] = pages
        own: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        if sinks is not None:
            axes["sinks"] = ("act_heads",)
        if ahead is not None:
            own["ahead"], axes["ahead"] = ahead[:, 0], (None,)
        return self._attention(layer, query, spec, axes=axes, **own)

    def _attention(
        self, layer: PagedLayer, query: jax.Array, spec: AttentionSpec, **options: Any
    ) -> Float[Array, "tokens 1 heads value_dim"]:
        # `CodedVectors` lack a dtype; their queries keep the dtype of the model.
        arrays = (query[:, 0].astype(getattr(layer.key, "dtype", query.dtype)), layer.key, layer.value)
        options |= {
            "block_tables": self.rows.block_tables,
            "kv_lengths": self.rows.kv_lengths,
            "query_starts": self.rows.query_starts,
            "window": spec.window,
            "softcap": spec.softcap,
            "scale": spec.scale,
            "layout": self.layout,
        }
        # The preference is read from the same call that is traced next, since it depends on shapes and options.
        if self.preferences is not None and (name := ops.page_layout(*arrays, **options)) is not None:
            self.preferences.names.append(name)
        output: Any = ops.paged_attention(*arrays, **options)
        return output[:, None].astype(query.dtype)

    def attend_latent(
        self,
        layer: PagedLayer,
        query: Float[Array, "tokens 1 heads dim"],
        latent: Float[Array, "tokens 1 dim"],
        spec: AttentionSpec,
        *,
        value_dim: int,
        index: KeySelection | None = None,
    ) -> tuple[Float[Array, "tokens 1 heads value_dim"], PagedLayer]:
        """Writes latents to their pages as keys of one head, whose first `value_dim` features are the values.

        Args:
          index: operands by which each token selects the latents that it attends to; None attends to all.
        """
        index_keys = None if index is None else self._put(layer.value, index.key)
        layer = PagedLayer(self._put(layer.key, latent), index_keys)
        page_tokens = jax.tree.leaves(layer.key)[0].shape[self.layout.index("s")]
        if index is not None and index.count < self.rows.block_tables.shape[1] * page_tokens:
            return self._attend_selected(layer, query, index, spec, value_dim), layer
        axes = {"query": (None, "act_heads", None), "key_pages": (None,) * 4}
        return self._attention(PagedLayer(layer.key, None), query, spec, value_dim=value_dim, axes=axes), layer

    def _attend_selected(
        self, layer: PagedLayer, query: jax.Array, index: KeySelection, spec: AttentionSpec, value_dim: int
    ) -> Float[Array, "tokens 1 heads value_dim"]:
        # `CodedVectors` lack a dtype; their queries keep the dtype of the model.
        own, other = (getattr(pool, "dtype", query.dtype) for pool in (layer.key, layer.value))
        output = attend_selected_pages(
            query[:, 0].astype(own),
            *(_without_heads(pool, self.layout) for pool in (layer.key, layer.value)),
            index=replace(index, query=index.query[:, 0].astype(other), weights=index.weights[:, 0]),
            rows=self.rows,
            scale=spec.scale,
            value_dim=value_dim,
        )
        return output[:, None].astype(query.dtype)

    def recur(self, layer: SlotStates, transition: Transition, *inputs: jax.Array) -> tuple[Any, SlotStates]:
        """Runs a recurrence over the tokens of each row, from the state of its sequence or zeros at its first token.

        Rows with one token run as one batch. Prompt chunks then run one after another in pieces of `_PIECE_TOKENS`
        tokens, which makes the cost proportional to tokens instead of rows times tokens.
        """
        output, layer = self._recur_single(layer, transition, inputs)
        if not self.single and len(inputs[0]) > 1:
            output, layer = self._recur_pieces(layer, transition, inputs, output)
        return jax.tree.map(lambda array: array[: len(inputs[0])], output), layer

    def _recur_single(
        self, layer: SlotStates, transition: Transition, inputs: tuple[jax.Array, ...]
    ) -> tuple[Any, SlotStates]:
        """Runs rows with one token; other outputs are zeros, including `_PIECE_TOKENS` of padding at the end."""
        rows, tokens = self.rows, len(inputs[0])
        counts = jnp.diff(rows.query_starts)
        # Padding rows start behind the last token. The clamp keeps them in bounds; `is_single` excludes their results.
        places = jnp.minimum(rows.query_starts[:-1], tokens - 1)
        is_single = counts == 1
        old_states = self._states_of(layer, rows.sequences, rows.kv_lengths - counts == 0)
        output, states = transition(old_states, is_single[:, None], *(array[places] for array in inputs))

        def scatter(outputs: jax.Array) -> jax.Array:
            empty = jnp.zeros((tokens + _PIECE_TOKENS, *outputs.shape[1:]), outputs.dtype)
            # The index behind the end is dropped, which leaves rows with several tokens or none unchanged.
            return empty.at[jnp.where(is_single, places, len(empty))].set(outputs, mode="drop")

        def store(old: jax.Array, new: jax.Array) -> jax.Array:
            target = jnp.where(is_single, rows.sequences, len(old))
            return old.at[target].set(new.astype(old.dtype), mode="drop")

        arrays = tuple(map(store, layer.arrays, states))
        return jax.tree.map(scatter, output), SlotStates(arrays)

    def _recur_pieces(
        self, layer: SlotStates, transition: Transition, inputs: tuple[jax.Array, ...], output: Any
    ) -> tuple[Any, SlotStates]:
        """Runs rows with several tokens and writes their outputs into `output`."""
        rows = self.rows
        counts = jnp.diff(rows.query_starts)
        # Rows with one token have 0 pieces, so the sum over `ends` in `run` skips such rows.
        pieces = jnp.where(counts > 1, -(-counts // _PIECE_TOKENS), 0)
        ends = jnp.cumsum(pieces)
        # The last piece may extend past the tokens; dynamic_slice would shift its start back instead of padding.
        padded = [jnp.pad(array, ((0, _PIECE_TOKENS), *[(0, 0)] * (array.ndim - 1))) for array in inputs]

        def run(number: Any, carry: tuple[Any, tuple[jax.Array, ...]]) -> Any:
            output, arrays = carry
            row = jnp.sum(number >= ends)
            processed = (number - ends[row] + pieces[row]) * _PIECE_TOKENS
            start, own = rows.query_starts[row] + processed, rows.sequences[row]
            valid = jnp.arange(_PIECE_TOKENS) < counts[row] - processed
            is_fresh = rows.kv_lengths[row] - counts[row] + processed == 0
            old_states = self._states_of(SlotStates(arrays), own[None], is_fresh[None])
            slices = (jax.lax.dynamic_slice_in_dim(array, start, _PIECE_TOKENS)[:, 0][None] for array in padded)
            piece, states = transition(old_states, valid[None], *slices)

            def write_piece(buffer: jax.Array, new: jax.Array) -> jax.Array:
                # The piece may overlap the tokens of the next row, whose outputs must survive.
                old = jax.lax.dynamic_slice_in_dim(buffer, start, _PIECE_TOKENS)
                is_new = valid.reshape(-1, *[1] * (old.ndim - 1))
                return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(is_new, new[0][:, None], old), start, 0)

            arrays = tuple(old.at[own].set(new[0].astype(old.dtype)) for old, new in zip(arrays, states, strict=True))
            return jax.tree.map(write_piece, output, piece), arrays

        output, arrays = jax.lax.fori_loop(0, ends[-1], run, (output, layer.arrays))
        return output, SlotStates(arrays)

    def _states_of(self, layer: SlotStates, slots: jax.Array, is_fresh: jax.Array) -> tuple[jax.Array, ...]:
        """Reads the states of slots; zeros for new sequences, because a slot retains the state of its previous one."""
        states = [array[slots] for array in layer.arrays]
        return tuple(jnp.where(is_fresh.reshape(-1, *[1] * (array.ndim - 1)), 0, array) for array in states)

    def advance(self, layers: Any, tokens: int) -> "PagedKVCache":
        """Returns the cache with updated layers. `tokens` is ignored because the host tracks sequence lengths."""
        return replace(self, layers=layers)

    def _put(self, pool: Any, new: jax.Array) -> Any:
        update = coded(new, pool.codes.dtype) if isinstance(pool, CodedVectors) else new.astype(pool.dtype)
        return jax.tree.map(self._write, pool, update)

    def load_hidden(self, pool: jax.Array) -> Float[Array, "tokens 1 embed"]:
        """Reads the hidden states of the tokens' places; zeros for padding."""
        found = pool.at[self._index(pool)].get(mode="fill", fill_value=0)
        return found.reshape(len(self.rows.pages), 1, pool.shape[-1])

    def store_hidden(self, pool: jax.Array, hidden: Float[Array, "tokens 1 embed"]) -> jax.Array:
        """Writes hidden states to the tokens' places."""
        hidden = hidden[:, :, None] if holds_values(self.layout) else hidden
        return self._write(pool, hidden.astype(pool.dtype))

    def _write(self, pool: jax.Array, new: jax.Array) -> jax.Array:
        if self.layout == "hpsd":  # adjacent index arrays keep their axis in place, after the heads
            new = new.swapaxes(0, 1)
        # Tokens of padding have a page number that is out of range, so their keys are dropped.
        return pool.at[self._index(pool)].set(new, mode="drop")

    def _index(self, pool: jax.Array) -> tuple[Any, ...]:
        """Returns the index of the tokens' places in a pool of one layer."""
        places = {"p": self.rows.pages, "s": self.rows.slots}
        if self.layout == "phsd":  # with an unindexed axis between indexed ones, XLA would copy the whole pool
            places = {axis: numbers[:, None] for axis, numbers in places.items()}
            places["h"] = jnp.arange(pool.shape[1])
        return tuple(places.get(axis, slice(None)) for axis in self.layout)


def _without_heads(pool: Any, layout: PageLayout) -> Any:
    """Returns a pool of one head as [pages, slots, features], which every layout has in this order."""
    return jax.tree.map(lambda array: jnp.squeeze(array, axis=layout.index("h")), pool)


def supports_shared_pool(states: Any) -> bool:
    """Returns whether every layer can store values in one pool with its keys: they exist and have equal width."""
    return not any(
        isinstance(state, Latent) or (isinstance(state, KeysValues) and state.key_dim != state.value_dim)
        for state in jax.tree.leaves(states)
    )


def empty_layers(
    states: Any, *, pages: int, page_tokens: int, slots: int, layout: PageLayout, dtype: CacheType = "model"
) -> Any:
    """Creates zero-filled page pools and slot states for all layers, in the structure of a model's `states`.

    Args:
      states: state specification of each layer.
      pages: number of pages per pool.
      page_tokens: number of tokens per page.
      slots: number of slots for recurrent states.
      layout: axis order of the pools.
      dtype: dtype of keys, values and latents; recurrent states always have the dtype given by the model.

    Raises:
      ConfigError: a layer has chunked attention.
    """

    def pool(state: KeysValues | Latent, kv_heads: int, features: int) -> Any:
        sizes = {"p": pages, "s": page_tokens, "h": kv_heads, "2": 2, "d": features}
        axes = (state.repeats, *(sizes[axis] for axis in layout))
        if dtype in CODE_DTYPES:
            return CodedVectors(jnp.zeros(axes, CODE_DTYPES[dtype]), jnp.zeros((*axes[:-1], 1), jnp.float32))
        return jnp.zeros(axes, _storage_dtype(state.dtype) if dtype == "model" else dtype)

    def layer(state: LayerState | HiddenStates) -> Any:
        match state:
            case HiddenStates(dim=dim):
                sizes = {"p": pages, "s": page_tokens, "h": 1, "2": 1, "d": dim}
                return jnp.zeros([sizes[axis] for axis in layout], _storage_dtype(state.dtype))
            case KeysValues(chunk=int(chunk)):
                raise ConfigError(
                    f"The paged engine has no chunked attention, which this model has (chunks of {chunk} tokens). "
                    "Serve it with the engine static, or, with model.dual_chunk, set model.max_positions to at most "
                    f"{chunk}."
                )
            case KeysValues(kv_heads=heads, key_dim=key_dim, value_dim=value_dim):
                value = None if holds_values(layout) else pool(state, heads, value_dim)
                return PagedLayer(pool(state, heads, key_dim), value)
            case Latent(dim=dim, index_dim=index_dim):
                return PagedLayer(pool(state, 1, dim), pool(state, 1, index_dim) if index_dim else None)
            case Recurrent(repeats=repeats, shapes=shapes, dtypes=dtypes):
                kinds = zip(shapes, dtypes, strict=True)
                return SlotStates(tuple(jnp.zeros((repeats, slots, *shape), dtype) for shape, dtype in kinds))

    return jax.tree.map(layer, states)


def _storage_dtype(dtype: str) -> str:
    """Chooses the dtype in which keys and values computed in `dtype` are stored.

    On CPUs, JAX 0.10 converts a whole bfloat16 pool to float32 and back in each step that writes to it, which makes a
    step 30 times slower.
    """
    on_cpu = target.value is None and jax.default_backend() == "cpu"
    widened = dtype == "bfloat16" and on_cpu and jax.__version_info__ < (0, 11)
    return "float32" if widened else dtype
