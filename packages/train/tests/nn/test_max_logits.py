"""The largest logits of attention, and the factors of projections that scale them, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_train.nn import attention, latent_attention, max_logits
from stack_train.nn.attention import Attention, Rope
from stack_train.nn.build import Build
from stack_train.nn.latent_attention import LatentAttention
from stack_train.nn.residual import Norm, Rows

EMBED, HEADS = 12, 4
# Two documents, of 7 and 4 tokens, and padding.
POSITIONS = np.array([*range(7), *range(4), 0, 1])
SEGMENTS = np.array([1] * 7 + [2] * 4 + [0] * 2)
LATENT = {"heads": HEADS, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5, "rope": Rope(), "scale": 0.3}
LAYERS = {
    "own keys": Attention(heads=HEADS, kv_heads=HEADS, head_dim=6, rope=Rope(), bias=True),
    "shared keys": Attention(heads=HEADS, kv_heads=2, head_dim=6, rope=Rope(), window=3),
    "gated": Attention(heads=HEADS, kv_heads=2, head_dim=6, rope=None, gated=True, chunk=3, scale=0.7),
    "latent": LatentAttention(**LATENT, query_rank=None),
    "latent queries": LatentAttention(**LATENT, query_rank=8),
}


def visible_pairs(window=None, chunk=None):
    places = np.arange(len(SEGMENTS))
    distance = places[:, None] - places
    visible = (distance >= 0) & (SEGMENTS[:, None] == SEGMENTS) & (SEGMENTS > 0)
    if chunk is not None:
        visible &= POSITIONS[:, None] // chunk == POSITIONS // chunk
    return visible if window is None else visible & (distance < window)


def layer_of(stacked):
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))


def logits_of(stacked, monkeypatch):
    """Returns the logits [heads, query, key] of a layer, and its record of the largest ones."""
    operands = []

    def attend(query, key, value, **options):
        operands[:] = [np.asarray(x[0], np.float64) for x in (query, key)]
        return jnp.zeros((*query.shape[:3], value.shape[-1]))

    for module in (attention, latent_attention):
        monkeypatch.setattr(module, "attend", attend)
    stacked.max_logits = stacked.recorder()
    layer = layer_of(stacked)
    x = np.random.default_rng(0).normal(size=(1, len(POSITIONS), EMBED)).astype(np.float32)
    layer(jnp.asarray(x), Rows(jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None]), None, None)
    query, key = operands
    scale = query.shape[-1] ** -0.5 if stacked.spec.scale is None else stacked.spec.scale
    logits = scale * np.einsum("qhd,khd->hqk", query, np.repeat(key, HEADS // key.shape[1], axis=1))
    return logits, np.asarray(layer.max_logits[...])


@pytest.mark.parametrize("name", LAYERS)
def test_layers_record_their_largest_logits_and_scale_those_of_each_head(name, monkeypatch):
    monkeypatch.setattr(max_logits, "_BLOCK_TOKENS", 4)
    spec = LAYERS[name]
    stacked = spec.build(Build(EMBED, 1, 0.4, 0.4, Norm(), "float32", jax.random.key(0)))
    for bias in (getattr(getattr(stacked, part, None), "bias", None) for part in ("query", "key")):
        if bias is not None:
            bias[...] = jax.random.normal(jax.random.key(1), bias.shape)
    logits, recorded = logits_of(stacked, monkeypatch)
    visible = visible_pairs(getattr(spec, "window", None), getattr(spec, "chunk", None))
    largest = np.where(visible, logits, -np.inf).max((1, 2))
    assert np.any(largest < np.where(visible_pairs().T | visible_pairs(), logits, -np.inf).max((1, 2)) - 1e-3)
    np.testing.assert_allclose(recorded, largest, rtol=1e-5)

    gamma = np.array([[0.5, 1.0, 0.9, 0.3]], np.float32)
    # Gates and values share a kernel with queries and keys.
    others = {"gated": "query", "latent": "kv", "latent queries": "kv"}.get(name)
    rest_of = lambda: np.asarray(getattr(stacked, others).kernel[...]).reshape(-1, HEADS, 12 if name == "gated" else 11)
    rest = rest_of()[:, :, 6:] if others else None
    for path, factor in stacked.clip_factors(jnp.asarray(gamma)).items():
        parameter = getattr(getattr(stacked, path[0]), path[1])
        parameter[...] = parameter[...] * factor
    scaled, _ = logits_of(stacked, monkeypatch)
    np.testing.assert_allclose(scaled, gamma[0][:, None, None] * logits, atol=1e-5)
    if others:
        np.testing.assert_array_equal(rest_of()[:, :, 6:], rest)


@pytest.mark.parametrize(("seq", "window"), [(13, None), (12, 5), (3, None)])
def test_blocks_find_the_maximum_of_the_full_matrix_of_bfloat16(seq, window, monkeypatch):
    monkeypatch.setattr(max_logits, "_BLOCK_TOKENS", 4)
    query, key = (
        jax.random.normal(jax.random.key(seed), (2, seq, heads, 6), jnp.bfloat16) for seed, heads in ((0, 6), (1, 2))
    )
    # All negative, so that a product with padding, which is 0, would be the largest.
    query, key = jnp.abs(query), -jnp.abs(key)
    found = max_logits.max_logits(query, key, window=window)
    wide = np.asarray(query, np.float64), np.repeat(np.asarray(key, np.float64), 3, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", *wide)
    distance = np.arange(seq)[:, None] - np.arange(seq)
    visible = (distance >= 0) & (distance <= (seq if window is None else window))
    np.testing.assert_allclose(found, np.where(visible, logits, -np.inf).max((0, 2, 3)), rtol=1e-6)
    assert found.dtype == jnp.float32


def test_blocks_outside_of_the_window_are_left_out(monkeypatch):
    monkeypatch.setattr(max_logits, "_BLOCK_TOKENS", 4)
    x = jnp.zeros((1, 32, 1, 2))

    def blocks(window):
        (scan,) = (
            each
            for each in jax.make_jaxpr(lambda x: max_logits.max_logits(x, x, window=window))(x).eqns
            if each.primitive.name == "scan"
        )
        return scan.params["length"]

    # Of 8 by 8 blocks: the diagonal and what is below, or what keys of up to 4 or 5 tokens ago are in.
    assert [blocks(window) for window in (None, 0, 4, 5)] == [36, 8, 15, 21]
