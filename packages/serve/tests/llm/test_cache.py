from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.caches import AttentionSpec, KeysValues, Latent, Recurrent
from stack_core.abi.errors import ConfigError
from stack_core.ops.building import is_quantized
from stack_core.ops.references.paged_pools import LAYOUTS
from stack_core.ops.selection import KeySelection
from stack_serve.llm import cache as cache_module
from stack_serve.llm import selected_pages
from stack_serve.llm.cache import HiddenStates, PagedKVCache, PagedLayer, Rows, empty_layers

SHAPE = KeysValues(repeats=2, kv_heads=2, key_dim=8, value_dim=8, dtype="float32")
PAGES, PAGE_TOKENS, HEADS = 6, 4, 4
# Row 0 continues a sequence of 5 tokens by 3, row 1 begins one with 2; one token is padding.
TABLES = np.array([[3, 1, 0], [5, 0, 0]], np.int32)
# Programs that run once on tiny arrays.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def layer_of(layers: PagedLayer) -> PagedLayer:
    return jax.tree.map(lambda pool: pool[0], layers)


def rows(starts: list[int], counts: list[int], tokens: int) -> Rows:
    positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    of_row = np.repeat(np.arange(len(starts)), counts)
    pages, slots = np.full(tokens, PAGES), np.zeros(tokens, int)
    pages[: len(positions)] = TABLES[of_row, positions // PAGE_TOKENS]
    slots[: len(positions)] = positions % PAGE_TOKENS
    starts_of_rows, sequences = np.concatenate([[0], np.cumsum(counts)]), np.arange(len(starts))
    arrays = (TABLES, np.add(starts, counts), starts_of_rows, pages, slots, sequences)
    return Rows(*(jnp.asarray(array, jnp.int32) for array in arrays))


def test_queries_of_another_layer_see_the_tokens_of_the_same_step() -> None:
    """They read the pages that the layer has written, and write none."""
    query, key, value = (jax.random.normal(each, (5, 1, 2, 8)) for each in jax.random.split(jax.random.key(1), 3))
    layers = empty_layers([SHAPE, None], pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout="pshd")
    assert layers[1] is None  # a layer that shares keys has no pages
    cache = PagedKVCache(layers, rows([0, 0], [5, 0], 5), "pshd")
    output, layer = cache.attend(layer_of(layers[0]), query, key, value, AttentionSpec())
    np.testing.assert_array_equal(cache.attend_shared(layer, query, AttentionSpec()), output)
    turned = cache.attend_shared(layer, query[:, :, ::-1], AttentionSpec())
    expected, _ = cache.attend(layer_of(layers[0]), query[:, :, ::-1], key, value, AttentionSpec())
    np.testing.assert_array_equal(turned, expected)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK_TO_COMPILE)
def attended(dtype: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
    """What row 0 and 1 get, and what dense attention to the same keys gives."""
    keys = jax.random.split(jax.random.key(1), 6)
    key, value = (jax.random.normal(keys[i], (10, SHAPE.kv_heads, SHAPE.key_dim)) for i in (0, 1))
    query = jax.random.normal(keys[2], (10, HEADS, SHAPE.key_dim))
    layers = empty_layers(SHAPE, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout=layout, dtype=dtype)
    first = PagedKVCache(layers, rows([0, 0], [5, 0], 5), layout)
    _, layer = first.attend(layer_of(layers), query[:5, None], key[:5, None], value[:5, None], AttentionSpec())
    second = PagedKVCache(layers, rows([5, 0], [3, 2], 6), layout)
    step = slice(5, 10)
    padded = [
        jnp.pad(x[step, None], ((0, 1), (0, 0), (0, 0), (0, 0)), constant_values=9.0) for x in (query, key, value)
    ]
    output, _ = second.attend(layer, *padded, AttentionSpec())

    def dense(places: slice, first_query: int) -> jax.Array:
        k, v = (jnp.repeat(x[places], HEADS // SHAPE.kv_heads, axis=1) for x in (key, value))
        q = query[places][first_query:]
        logits = jnp.einsum("qhd,khd->hqk", q, k) * SHAPE.key_dim**-0.5
        seen = jnp.arange(len(k)) <= jnp.arange(first_query, len(k))[:, None]
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v)

    return output[:5, 0], jnp.concatenate([dense(slice(0, 8), 5), dense(slice(8, 10), 0)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_hold_what_dense_attention_sees(layout: Any) -> None:
    found, expected = attended("model", layout)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "error", "layout"),
    [
        ("bfloat16", 0.02, "pshd"),
        ("int8", 0.02, "pshd"),
        ("int8", 0.02, "psh2d"),
        ("fp8_e4m3", 0.08, "pshd"),
        ("fp8_e5m2", 0.2, "pshd"),
    ],
)
def test_narrow_pages_are_close(dtype: Any, error: float, layout: Any) -> None:
    found, expected = attended(dtype, layout)
    distance = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
    assert 0 < distance < error


def test_quantized_pages_take_a_byte_an_entry_and_a_scale_a_vector() -> None:
    layers = empty_layers(SHAPE, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout="pshd", dtype="int8")
    assert is_quantized(layers.key)
    entries = SHAPE.repeats * PAGES * PAGE_TOKENS * SHAPE.kv_heads * SHAPE.key_dim
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) == 2 * (entries + entries // SHAPE.key_dim * 4)


def test_padding_writes_nowhere() -> None:
    layers = empty_layers(SHAPE, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout="pshd")
    ones = jnp.ones((3, 1, SHAPE.kv_heads, SHAPE.key_dim))
    cache = PagedKVCache(layers, rows([0, 0], [1, 0], 3), "pshd")
    _, layer = cache.attend(layer_of(layers), jnp.ones((3, 1, HEADS, SHAPE.key_dim)), ones, ones, AttentionSpec())
    assert jnp.count_nonzero(layer.key) == SHAPE.kv_heads * SHAPE.key_dim


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_are_read_from_the_places_where_they_were_stored(layout: Any) -> None:
    sizes: dict[str, Any] = {"pages": PAGES, "page_tokens": PAGE_TOKENS, "slots": 3}
    pool: Any = empty_layers(HiddenStates(dim=3, dtype="float32"), layout=layout, dtype="int8", **sizes)
    hidden = jax.random.normal(jax.random.key(0), (6, 1, 3))
    pool = PagedKVCache(None, rows([5, 0], [3, 2], 6), layout).store_hidden(pool, hidden)
    found = PagedKVCache(None, rows([6, 0], [2, 1], 4), layout).load_hidden(pool)
    np.testing.assert_array_equal(found[:3], hidden[jnp.array([1, 2, 3])])
    assert not found[3].any()


def test_latents_are_keys_of_one_head_whose_first_features_are_values() -> None:
    state = Latent(repeats=1, dim=8, value_dim=5, dtype="float32")
    latent, query = jax.random.normal(jax.random.key(0), (5, 8)), jax.random.normal(jax.random.key(1), (5, HEADS, 8))

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def attend(latent: jax.Array, query: jax.Array) -> tuple[jax.Array, PagedLayer]:
        layers = empty_layers(state, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout="pshd")
        cache = PagedKVCache(layers, rows([0, 0], [5, 0], 5), "pshd")
        arguments = (query[:, None], latent[:, None], AttentionSpec(scale=0.3))
        return cache.attend_latent(layer_of(layers), *arguments, value_dim=5)

    output, layer = attend(latent, query)
    logits = jnp.where(jnp.tri(5, dtype=bool), 0.3 * jnp.einsum("qhd,kd->hqk", query, latent), -jnp.inf)
    expected = jnp.einsum("hqk,kd->qhd", jax.nn.softmax(logits), latent[:, :5])
    np.testing.assert_allclose(output[:, 0], expected, atol=1e-5)
    assert layer.value is None and jnp.count_nonzero(layer.key) == latent.size


@partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK_TO_COMPILE)
def attended_by_index(dtype: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Outputs of the last 5 of 8 tokens of row 0 and 2 of row 1, and what dense attention to the same keys gives."""
    state, count = Latent(repeats=1, dim=8, value_dim=5, dtype="float32", index_dim=6), 3
    shapes = {"query": (HEADS, 8), "latent": (8,), "index_query": (7, 6), "weights": (7,), "index_key": (6,)}
    keys = jax.random.split(jax.random.key(1), len(shapes))
    given = {
        name: jax.random.normal(key, (10, *shape)) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    layers = empty_layers(state, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout=layout, dtype=dtype)
    layer = jax.tree.map(lambda pool: pool + jnp.asarray(jnp.nan, pool.dtype), layer_of(layers))  # unwritten slots

    def attend(layer: Any, of_step: Rows, tokens: slice, padding: int) -> Any:
        widths = lambda array: ((0, padding), *[(0, 0)] * array.ndim)
        query, latent, *index = (
            jnp.pad(given[name][tokens, None], widths(given[name]), constant_values=9.0) for name in shapes
        )
        index = KeySelection(query=index[0], weights=index[1], key=index[2], count=count)
        cache = PagedKVCache(None, of_step, layout)
        return cache.attend_latent(layer, query, latent, AttentionSpec(scale=0.3), value_dim=5, index=index)

    first, layer = attend(layer, rows([0, 0], [3, 0], 3), slice(0, 3), 0)
    output, _ = attend(layer, rows([3, 0], [5, 2], 8), slice(3, 10), 1)

    def dense(places: slice) -> jax.Array:
        query, latent, index_query, weights, index_key = (given[name][places] for name in shapes)
        scores = jnp.einsum("qh,qhk->qk", weights, jax.nn.relu(jnp.einsum("qhd,kd->qhk", index_query, index_key)))
        scores = jnp.where(jnp.tri(len(query), dtype=bool), scores, -jnp.inf)
        selected = jnp.argsort(jnp.argsort(-scores)) < count
        logits = 0.3 * jnp.einsum("qhd,kd->hqk", query, latent)
        weights = jax.nn.softmax(jnp.where(selected & (scores > -jnp.inf), logits, -jnp.inf))
        return jnp.einsum("hqk,kd->qhd", weights, latent[:, :5])

    return jnp.concatenate([first, output])[:, 0], jnp.concatenate([dense(slice(0, 8)), dense(slice(8, 10))])


@pytest.mark.parametrize("layout", ["phsd", "pshd", "hpsd"])
def test_tokens_attend_to_the_latents_that_an_indexer_selects(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "hpsd":  # parts of two tokens, the last one padded
        monkeypatch.setattr(selected_pages, "_PART_BYTES", 2 * 4 * (TABLES.shape[1] * PAGE_TOKENS * 13 + 3 * 8))
    found, expected = attended_by_index("model", layout)
    np.testing.assert_allclose(found[:10], expected, atol=1e-5)
    assert not found[10].any()  # padding


SUMS = Recurrent(repeats=1, shapes=((2,), ()), dtypes=("float32", "float32"))


def running_sum(state: Any, valid: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    """The sums so far of the inputs, of which invalid ones count nothing; and how many there were."""
    total, count = state
    sums = total[:, None] + jnp.cumsum(jnp.where(valid[..., None], x, 0), axis=1)
    return sums, (sums[:, -1], count + jnp.sum(valid.astype(jnp.float32), axis=1))


@pytest.mark.parametrize("piece_tokens", [2, 64])
def test_a_rows_state_goes_on_where_its_sequence_stood(piece_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of prompts, single tokens beside them, padding behind, and a slot that another sequence had before."""
    monkeypatch.setattr(cache_module, "_PIECE_TOKENS", piece_tokens)
    layers = empty_layers(SUMS, pages=PAGES, page_tokens=PAGE_TOKENS, slots=3, layout="pshd")
    layer = jax.tree.map(lambda array: array[0] + 7, layers)  # left behind by other sequences
    x = jax.random.normal(jax.random.key(0), (20, 1, 2))
    steps = [([0, 0], [5, 1], 8), ([5, 1], [1, 1], 2), ([6, 2], [0, 3], 4), ([6, 5], [1, 0], 2)]
    found: list[list[Any]] = [[], []]
    inputs: list[list[Any]] = [[], []]
    for (starts, counts, tokens), first in zip(steps, (0, 8, 10, 14), strict=True):
        single = max(counts) == 1 and tokens == 2
        step = PagedKVCache(layers, rows(starts, counts, tokens), "pshd", single)
        output, layer = step.recur(layer, running_sum, x[first : first + tokens])
        assert output.shape == (tokens, 1, 2)
        ends = np.cumsum([0, *counts])
        for row in (0, 1):
            found[row] += list(output[ends[row] : ends[row + 1], 0])
            inputs[row] += list(x[first + ends[row] : first + ends[row + 1], 0])
    for row in (0, 1):
        np.testing.assert_allclose(np.stack(found[row]), np.cumsum(np.stack(inputs[row]), axis=0), atol=1e-5)
    assert layer.arrays[1].tolist() == [7, 5, 7]  # sequences lie in slots 0 and 1; nothing touched slot 2


def test_chunked_attention_is_refused_by_name():
    state = KeysValues(repeats=1, kv_heads=2, key_dim=4, value_dim=4, dtype="float32", window=8, chunk=8)
    with pytest.raises(ConfigError, match=r"no chunked attention.*chunks of 8 tokens.*static"):
        empty_layers([[state]], pages=4, page_tokens=2, slots=1, layout="pshd")
