"""The dense cache, in float and as codes, beside attention to all tokens in float."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues, KVCache, Latent, Recurrent
from stack_core.abi.errors import ArgumentError
from stack_core.ops.kv_cache import DenseKVCache
from stack_core.ops.selection import KeySelection

SHAPE = KeysValues(repeats=2, kv_heads=2, key_dim=32, value_dim=32, dtype="float32")
SEQ, HEADS = 12, 4
DEFAULT = AttentionSpec()
MOST = {"model": 1e-6, "int8": 0.01, "fp8_e4m3": 0.04, "fp8_e5m2": 0.08}
"""The relative error of attention to random keys and values."""


def empty(kind: Any = "int8", shape: KeysValues = SHAPE) -> DenseKVCache:
    return DenseKVCache.empty(shape, batch=3, capacity=16, storage=kind)


def tokens() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (HEADS, SHAPE.kv_heads, SHAPE.kv_heads)
    # Tokens of very different size, as those of real models are: each needs its own scale.
    sizes = jnp.exp(jax.random.normal(jax.random.key(1), (3, SEQ, 1, 1)))
    query, key, value = (jax.random.normal(key, (3, SEQ, n, 32)) for key, n in zip(keys, counts, strict=True))
    return query, key, value * sizes


def run(cache: Any, parts: list[int], spec: AttentionSpec = DEFAULT) -> tuple[Any, Any]:
    """The outputs of a scan over the layers, all of which see the same tokens, appended part by part."""
    query, key, value = tokens()
    outputs = []

    @jax.jit
    def step(cache: Any, *arrays: Any) -> Any:
        def layer(_: None, layer_cache: Any) -> Any:
            output, layer_cache = cache.attend(layer_cache, *arrays, spec)
            return None, (output, layer_cache)

        _, (output, layers) = jax.lax.scan(layer, None, cache.layers)
        return output, cache.advance(layers, arrays[0].shape[1])

    start = 0
    for part in parts:
        output, cache = step(cache, *(array[:, start : start + part] for array in (query, key, value)))
        outputs.append(output)
        start += part
    return jnp.concatenate(outputs, axis=2), cache


def error(actual: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


@pytest.mark.covering
@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("spec", [DEFAULT, AttentionSpec(window=(3, 0), scale=0.3)])
def test_it_is_near_attention_in_float(kind: str, spec: AttentionSpec) -> None:
    query, key, value = tokens()
    output, cache = run(empty(kind), [7, 1, 1, 3], spec)
    expected = ops.attention(query, key, value, causal=True, window=spec.window, scale=spec.scale)
    assert isinstance(cache, KVCache) and cache.lengths.tolist() == [SEQ] * 3
    for layer in output:
        assert (0 if kind == "model" else 1e-3) <= error(layer, expected) <= MOST[kind]


@pytest.mark.parametrize("kind", [pytest.param("model", marks=pytest.mark.slow), "int8"])
def test_queries_of_another_layer_see_the_tokens_of_the_same_call(kind: str) -> None:
    query, key, value = tokens()
    spec, cache, first, found = AttentionSpec(window=(3, 0)), empty(kind), [], []
    for part in (slice(0, 7), slice(7, SEQ)):
        arrays = [array[:, part] for array in (query, key, value)]
        output, layer = cache.attend(jax.tree.map(lambda array: array[0], cache.layers), *arrays, spec)
        first.append(output)
        found.append(cache.attend_shared(layer, arrays[0][:, :, ::-1], spec))
        cache = cache.advance(jax.tree.map(lambda array: array[None], layer), part.stop - part.start)
    expected = ops.attention(query[:, :, ::-1], key, value, causal=True, window=spec.window)
    assert error(jnp.concatenate(found, axis=1), expected) <= MOST[kind]
    assert error(jnp.concatenate(first, axis=1), expected) > 0.1


def test_chunks_attend_to_themselves() -> None:
    query, key, value = tokens()
    output, _ = run(empty("model"), [7, 1, 1, 3], AttentionSpec(window=(3, 0), chunk=4))
    segments = jnp.broadcast_to(jnp.arange(SEQ) // 4, (3, SEQ))
    expected = ops.attention(query, key, value, causal=True, segment_ids=segments)
    for layer in output:
        np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), (3, 0)])
def test_tokens_of_an_image_see_the_rest_of_it(window: Any) -> None:
    query, key, value = tokens()
    ahead = np.zeros((3, SEQ), np.int32)
    ahead[:, 4:9] = np.arange(5)[::-1]
    spec, cache = AttentionSpec(window=window), empty("model")
    outputs = []
    for part in (slice(0, 3), slice(3, 10), slice(10, SEQ)):  # the image is in one call
        arrays = (array[:, part] for array in (query, key, value))
        layer = jax.tree.map(lambda array: array[0], cache.layers)
        output, layer = cache.attend(layer, *arrays, spec, ahead=jnp.asarray(ahead[:, part]))
        outputs.append(output)
        cache = cache.advance(jax.tree.map(lambda array: array[None], layer), part.stop - part.start)
    places = np.arange(SEQ)
    mask = places <= (places + ahead[0])[:, None]
    if window is not None:
        mask &= places >= (places - window[0])[:, None]
    expected = ops.attention(query, key, value, mask=jnp.asarray(mask[None, None]))
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, atol=1e-5)


def test_tokens_are_rounded_once_whatever_the_parts() -> None:
    outputs = [run(empty(), parts)[0] for parts in ([12], [5, 7], [1] * 12)]
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-5, atol=1e-5)


def test_padding_behind_a_row_is_forgotten() -> None:
    query, key, value = tokens()
    cache = empty().expecting(jnp.array([4, 12, 2]))
    layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
    _, layer = cache.attend(layer, query, key, value, DEFAULT)
    cache = cache.advance(layer, SEQ)
    assert cache.lengths.tolist() == [4, 12, 2] and cache.expected is None
    output, _ = cache.attend(layer, query[:, :1], key[:, 5:6], value[:, 5:6], DEFAULT)
    expected = ops.attention(
        query[2:, :1],
        jnp.concatenate([key[2:, :2], key[2:, 5:6]], 1),
        jnp.concatenate([value[2:, :2], value[2:, 5:6]], 1),
    )
    assert error(output[2:], expected) < 0.02


def test_latents_are_keys_and_values_of_every_head() -> None:
    dim, value_dim = 6, 4
    cache = DenseKVCache.empty(Latent(repeats=1, dim=dim, value_dim=value_dim, dtype="float32"), batch=2, capacity=8)
    query = jax.random.normal(jax.random.key(0), (2, 5, HEADS, dim))
    latent = jax.random.normal(jax.random.key(1), (2, 5, dim))
    layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
    _, layer = cache.attend_latent(layer, query[:, :3], latent[:, :3], DEFAULT, value_dim=value_dim)
    output, _ = cache.advance(layer, 3).attend_latent(layer, query[:, 3:], latent[:, 3:], DEFAULT, value_dim=value_dim)
    shared = latent[:, :, None]
    expected = ops.attention(query[:, 3:], shared, shared, causal=True)[..., :value_dim]
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_queries_attend_to_the_latents_that_an_indexer_selects() -> None:
    """In parts of a prompt, like a call with all tokens; the mask of each query is written out."""
    dim, value_dim, count, seq = 6, 4, 3, 9
    state = Latent(repeats=1, dim=dim, value_dim=value_dim, dtype="float32", index_dim=5)
    cache = DenseKVCache.empty(state, batch=2, capacity=12)
    shapes = {"query": (HEADS, dim), "latent": (dim,), "index_query": (2, 5), "weights": (2,), "index_key": (5,)}
    random = np.random.default_rng(0)
    given = {name: jnp.asarray(random.normal(size=(2, seq, *shape)), "float32") for name, shape in shapes.items()}
    outputs = []
    for part in (slice(0, 4), slice(4, 5), slice(5, seq)):
        query, latent, *index = (given[name][:, part] for name in shapes)
        selection = KeySelection(query=index[0], weights=index[1], key=index[2], count=count)
        layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
        output, layer = cache.attend_latent(layer, query, latent, DEFAULT, value_dim=value_dim, index=selection)
        cache = cache.advance(jax.tree.map(lambda leaf: leaf[None], layer), part.stop - part.start)
        outputs.append(output)
    scores = np.einsum("bqhd,bkd->bqhk", given["index_query"], given["index_key"])
    scores = np.einsum("bqh,bqhk->bqk", given["weights"], np.maximum(scores, 0))
    mask = np.zeros((2, seq, seq), bool)
    for row, query in np.ndindex(2, seq):
        mask[row, query, np.argsort(-scores[row, query, : query + 1], kind="stable")[:count]] = True
    shared = given["latent"][:, :, None]
    expected = ops.attention(given["query"], shared, shared, mask=jnp.asarray(mask[:, None]))[..., :value_dim]
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6)


def test_padding_moves_no_recurrent_state() -> None:
    cache = DenseKVCache.empty(Recurrent(repeats=1, shapes=((3,),), dtypes=("float32",)), batch=2, capacity=8)
    layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
    x = jnp.arange(24.0).reshape(2, 4, 3)

    def add_up(state: Any, valid: Any, x: Any) -> Any:
        sums = state[0][:, None] + jnp.cumsum(jnp.where(valid[..., None], x, 0), axis=1)
        return sums, (sums[:, -1],)

    _, layer = cache.expecting(jnp.array([1, 4])).recur(layer, add_up, x)
    np.testing.assert_array_equal(layer.arrays[0], [x[0, 0], x[1].sum(0)])


def test_it_holds_half_the_bytes() -> None:
    shape = KeysValues(repeats=2, kv_heads=2, key_dim=128, value_dim=128, dtype="bfloat16")
    caches = [empty(kind, shape) for kind in ("model", "int8")]
    floats, codes = (sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) for cache in caches)
    assert codes == floats * (128 + 4) // (2 * 128)


def test_other_types_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'int4': expected one of 'model', 'int8', 'fp8_e4m3', 'fp8_e5m2'"):
        empty("int4")


def test_a_bias_is_added_to_the_scores() -> None:
    """Of the places of the cache: the call's own tokens and those before it."""
    query, key, value = tokens()
    bias = jax.random.normal(jax.random.key(2), (3, HEADS, SEQ, SEQ))
    expected: Any = ops.attention(query, key, value, causal=True, bias=bias)
    cache, found, start = empty("model"), [], 0
    assert cache.capacity == 16
    for part in (5, 1, 6):
        places = slice(start, start + part)
        wide = jnp.pad(bias[:, :, places], ((0, 0), (0, 0), (0, 0), (0, 16 - SEQ)), constant_values=9.0)
        layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
        output, layer = cache.attend(layer, query[:, places], key[:, places], value[:, places], DEFAULT, bias=wide)
        found.append(output)
        cache = cache.advance(jax.tree.map(lambda leaf: leaf[None], layer), part)
        start += part
    assert error(jnp.concatenate(found, axis=1), expected) < MOST["model"]
