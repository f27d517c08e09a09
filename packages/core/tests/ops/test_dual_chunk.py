"""Dual chunk attention against the full matrix of relative positions, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.ops import dual_chunk
from stack_core.ops.dual_chunk import DualChunk, attend_dual_chunks

BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 23, 4, 2, 6
FREQUENCIES = 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
SIZES = {
    "near tokens are exact": DualChunk(chunk=7, local=2),
    "no local tokens": DualChunk(chunk=5, local=0),
    "all tokens of a chunk are local": DualChunk(chunk=8, local=4, trained=6),
}


def distances(sizes: DualChunk, positions: Any) -> Any:
    """The relative position of each query and key, from the definition."""
    stride, found = sizes.chunk - sizes.local, np.zeros((SEQ, SEQ), int)
    for i, query in enumerate(positions):
        for j, key in enumerate(positions):
            place = {
                0: query % stride,
                1: min(query % stride + stride, sizes.chunk),
            }.get(query // stride - key // stride, min(2 * stride - 1, sizes.chunk))
            found[i, j] = place - key % stride
    return found


def by_formula(query: Any, key: Any, value: Any, relative: Any, scale: Any, segments: Any) -> Any:
    """Softmax of q R(-distance) k, without rotated queries or keys."""
    angles = jnp.asarray(relative, float)[..., None] * FREQUENCIES
    (q1, q2), (k1, k2) = (jnp.split(x, 2, axis=-1) for x in (query, jnp.repeat(key, HEADS // KV_HEADS, axis=2)))
    even = jnp.einsum("bqhf,bkhf,qkf->bhqk", q1, k1, jnp.cos(angles))
    even += jnp.einsum("bqhf,bkhf,qkf->bhqk", q2, k2, jnp.cos(angles))
    odd = jnp.einsum("bqhf,bkhf,qkf->bhqk", q1, k2, jnp.sin(angles))
    odd -= jnp.einsum("bqhf,bkhf,qkf->bhqk", q2, k1, jnp.sin(angles))
    places = np.arange(SEQ)
    visible = (places[:, None] >= places) & (segments[:, None] == segments)
    logits = jnp.where(visible, scale[:, None] * (even + odd) / np.sqrt(DIM), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), jnp.repeat(value, HEADS // KV_HEADS, axis=2))


def rotated(x: Any, positions: Any) -> Any:
    angles = jnp.asarray(positions, float)[:, None, None] * FREQUENCIES
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [low * jnp.cos(angles) - high * jnp.sin(angles), high * jnp.cos(angles) + low * jnp.sin(angles)], axis=-1
    )


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("block_bytes", [2**26, 4 * BATCH * HEADS * 3 * SEQ * 5], ids=["one block", "blocks of 5"])
def test_values_and_gradients_are_those_of_relative_positions(
    name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_chunk, "_BLOCK_BYTES", block_bytes)
    sizes, first = SIZES[name], 17
    segments = np.array([1] * first + [2] * (SEQ - first))
    positions = np.array([*range(first), *range(SEQ - first)])
    trained = sizes.trained or SEQ
    scale = np.maximum(1, 0.1 * np.log((positions + 1) / trained) + 1) ** 2
    assert (scale > 1).any() == (sizes.trained is not None)
    relative = distances(sizes, positions)
    seen = relative[:first, :first][np.tril_indices(first)]
    assert seen.min() >= 0 and seen.max() <= sizes.chunk < first - 1
    near = np.tril_indices(first)[0] - np.tril_indices(first)[1] <= sizes.local
    assert (seen[near] == (np.tril_indices(first)[0] - np.tril_indices(first)[1])[near]).all()
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(rng.normal(size=(BATCH, SEQ, heads, DIM))) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        cotangent = jnp.asarray(rng.normal(size=(BATCH, SEQ, HEADS, DIM)))
        ids = jnp.broadcast_to(jnp.asarray(segments), (BATCH, SEQ))
        at = jnp.asarray(positions)
        chunks = jnp.broadcast_to(at // sizes.stride, (BATCH, SEQ))

        def loss(query: Any, key: Any, value: Any) -> Any:
            queries = jnp.stack([rotated(query, each) for each in sizes.query_positions(at)], axis=2)
            factor = sizes.query_scale(at)
            if factor is not None:
                np.testing.assert_allclose(factor, scale, rtol=1e-6)
                queries = queries * scale[:, None, None, None]
            output = attend_dual_chunks(
                queries,
                rotated(key, sizes.key_positions(at)),
                value,
                places=jnp.broadcast_to(jnp.arange(SEQ), (BATCH, SEQ)),
                chunks=(chunks, chunks),
                segments=(ids, ids),
            )
            return jnp.sum(output * cotangent), output

        def expected_loss(*arrays: Any) -> Any:
            output = by_formula(*arrays, relative, jnp.asarray(scale), segments)
            return jnp.sum(output * cotangent), output

        grad = lambda function: jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)
        (_, output), gradients = grad(loss)(*arrays)
        (_, expected), expected_gradients = grad(expected_loss)(*arrays)
    np.testing.assert_allclose(output, expected, atol=1e-12)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-11)


def test_local_tokens_beyond_the_chunk_before_are_refused() -> None:
    with pytest.raises(ConfigError, match="local=5, more than half of chunk=8"):
        DualChunk(chunk=8, local=5)
