"""Chunks, temperatures and norms of attention, by hand in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ConfigError
from stack_train.nn.attention import Attention, Rope, Temperature
from stack_train.nn.build import Build
from stack_train.nn.residual import Norm, Rows

EMBED, HEADS, KV_HEADS, HEAD_DIM, CHUNK = 12, 4, 2, 6, 4
TEMPERATURE = Temperature(rate=0.5, tokens=3, offset=1)
# Two documents, of 7 and 6 tokens, and padding.
POSITIONS = np.array([*range(7), *range(6), 0])
SEGMENTS = np.array([1] * 7 + [2] * 6 + [0])


def projected(module, name, x, heads):
    return (x @ np.asarray(getattr(module, name).kernel[0])).reshape(len(x), heads, HEAD_DIM)


def by_hand(module, x):
    """Softmax over the tokens of the same chunk of the same document, up to each token."""
    query, key, value = (
        projected(module, name, x, heads) for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    )
    query, key = (part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-5) for part in (query, key))
    query = query * (1 + 0.5 * np.log(1 + (POSITIONS + 1) // 3))[:, None, None]
    key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
    places = np.arange(len(x))
    visible = places[:, None] >= places
    for ids in (SEGMENTS, POSITIONS // CHUNK):
        visible &= ids[:, None] == ids
    scores = np.where(visible[None], np.einsum("qhd,khd->hqk", query, key) / np.sqrt(HEAD_DIM), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)
    return output.reshape(len(x), -1) @ np.asarray(module.output.kernel[0])


def test_chunks_of_packed_documents_attend_to_themselves():
    spec = Attention(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope=None,
        chunk=CHUNK,
        unit_norms=True,
        temperature=TEMPERATURE,
    )
    stacked = spec.build(Build(EMBED, 1, 0.4, 0.4, Norm(epsilon=1e-5), "float32", jax.random.key(0)))
    graph, state = nnx.split(stacked)
    layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    x = np.random.default_rng(0).normal(size=(len(POSITIONS), EMBED)).astype(np.float32)
    rows = Rows(jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None])
    output, _ = layer(jnp.asarray(x)[None], rows, None, None)
    np.testing.assert_allclose(output[0], by_hand(stacked, x), atol=2e-5, rtol=2e-5)
    assert spec.op_spec.window == (CHUNK - 1, 0) and spec.op_spec.chunk == spec.state(1, "float32").chunk == CHUNK


def test_attention_without_rope_ignores_positions():
    def outputs(rope):
        spec = Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope=rope)
        stacked = spec.build(Build(EMBED, 1, 0.4, 0.4, Norm(), "float32", jax.random.key(0)))
        graph, state = nnx.split(stacked)
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
        x = jax.random.normal(jax.random.key(1), (1, 8, EMBED))
        return [layer(x, Rows(step * jnp.arange(8)[None], None), None, None)[0] for step in (1, 3)]

    for rope, is_equal in ((None, True), (Rope(), False)):
        near, far = outputs(rope)
        assert np.allclose(near, far, atol=1e-6) == is_equal


def test_windows_of_chunks_are_refused():
    with pytest.raises(ConfigError, match="window=3 and chunk=4"):
        Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope=None, window=3, chunk=4)
