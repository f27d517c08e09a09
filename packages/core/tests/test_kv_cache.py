"""The dense cache, in float and as codes, beside attention to all tokens in float."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.errors import ArgumentError
from stack_core.kv_cache import DenseKVCache
from stack_core.protocols import AttentionSpec, KVCache, KVCacheShape

SHAPE = KVCacheShape(layers=2, kv_heads=2, head_dim=32, dtype="float32")
SEQ, HEADS = 12, 4
DEFAULT = AttentionSpec()
MOST = {"model": 1e-6, "int8": 0.01, "fp8_e4m3": 0.04, "fp8_e5m2": 0.08}
"""The relative error of attention to random keys and values."""


def empty(kind: Any = "int8", shape: KVCacheShape = SHAPE) -> DenseKVCache:
    return DenseKVCache.empty(shape, batch=3, capacity=16, type=kind)


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


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("spec", [DEFAULT, AttentionSpec(window=(3, 0), scale=0.3)])
def test_it_is_near_attention_in_float(kind: str, spec: AttentionSpec) -> None:
    query, key, value = tokens()
    output, cache = run(empty(kind), [7, 1, 1, 3], spec)
    expected = ops.attention(query, key, value, causal=True, window=spec.window, scale=spec.scale)
    assert isinstance(cache, KVCache) and cache.lengths.tolist() == [SEQ] * 3
    for layer in output:
        assert (0 if kind == "model" else 1e-3) <= error(layer, expected) <= MOST[kind]


def test_tokens_are_rounded_once_whatever_the_parts() -> None:
    outputs = [run(empty(), parts)[0] for parts in ([12], [5, 7], [1] * 12)]
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-5, atol=1e-5)


def test_what_is_truncated_is_forgotten() -> None:
    query, key, value = tokens()
    _, cache = run(empty(), [12])
    cache = cache.truncate(jnp.array([4, 12, 2]))
    assert cache.lengths.tolist() == [4, 12, 2] and cache.capacity == 16
    layer = jax.tree.map(lambda leaf: leaf[0], cache.layers)
    output, _ = cache.attend(layer, query[:, :1], key[:, 5:6], value[:, 5:6], DEFAULT)
    expected = ops.attention(
        query[2:, :1],
        jnp.concatenate([key[2:, :2], key[2:, 5:6]], 1),
        jnp.concatenate([value[2:, :2], value[2:, 5:6]], 1),
    )
    assert error(output[2:], expected) < 0.02


def test_it_holds_half_the_bytes() -> None:
    shape = KVCacheShape(layers=2, kv_heads=2, head_dim=128, dtype="bfloat16")
    caches = [empty(kind, shape) for kind in ("model", "int8")]
    floats, codes = (sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers)) for cache in caches)
    assert codes == floats * (128 + 4) // (2 * 128)


def test_other_types_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'int4': expected one of 'model', 'int8', 'fp8_e4m3', 'fp8_e5m2'"):
        empty("int4")
