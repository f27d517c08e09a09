"""Compressed entries against NumPy in float64, and attention in blocks against attention in one block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_train.nn import compressed_attention
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build
from stack_train.nn.compressed_attention import CompressedAttention
from stack_train.nn.compressor import Compressor, EntryIndexer, complete_windows
from stack_train.nn.residual import Norm, Rows

EMBED, DIM, SEQ, RATE, EPSILON = 6, 5, 11, 3, 1e-2
ROPE = Rope(theta=7.0, rotary_dim=4, interleaved=True)
SEGMENTS = np.array([[1] * 7 + [2] * 4, [1] * 11])
# Documents whose first position is not 0 are counted from their first token, too.
POSITIONS = np.array([[*range(7), *range(2, 6)], [*range(11)]])
ROWS = Rows(jnp.array(POSITIONS), jnp.array(SEGMENTS))
LASTS = ((2, 5, 9), (2, 5, 8))
"""Last tokens of the windows of each row; the tokens behind them fill no window."""


def build(spec, **options):
    module = spec.build(Build(EMBED, 1, 0.5, 0.5, Norm(epsilon=EPSILON), "float32", jax.random.key(0)), **options)
    graph, state = nnx.split(module)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return graph, jax.tree.map(lambda leaf: 0.5 * jax.random.normal(next(keys), leaf.shape[1:]), state)


def entries_by_hand(x, value, gate, bias, scale, overlaps):
    """One feature at a time."""
    found = np.zeros((2, len(LASTS[0]), DIM))
    for row, entry in np.ndindex(2, len(LASTS[0])):
        last = LASTS[row][entry]
        parts = [(range(last - RATE + 1, last + 1), DIM if overlaps else 0)]
        if overlaps and last >= RATE and SEGMENTS[row, last] == SEGMENTS[row, last - RATE]:
            parts.append((range(last - 2 * RATE + 1, last - RATE + 1), 0))
        pooled = np.zeros(DIM)
        for feature in range(DIM):
            places = [
                (x[row, token], place, first + feature) for each, first in parts for place, token in enumerate(each)
            ]
            weights = np.exp([token @ gate[:, column] + bias[place, column] for token, place, column in places])
            values = np.array([token @ value[:, column] for token, _, column in places])
            pooled[feature] = weights @ values / weights.sum()
        normed = scale * pooled / np.sqrt(np.mean(pooled**2) + EPSILON)
        for pair in (0, 1):
            one, two = DIM - 4 + 2 * pair, DIM - 3 + 2 * pair
            angle = POSITIONS[row, last - RATE + 1] * 7.0 ** (-pair / 2)
            turned = complex(normed[one], normed[two]) * np.exp(1j * angle)
            normed[one], normed[two] = turned.real, turned.imag
        found[row, entry] = normed
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_entries_are_sums_of_their_windows_in_value_and_gradient(overlaps):
    spec, random = Compressor(rate=RATE, dim=DIM, rope=ROPE, overlaps=overlaps), np.random.default_rng(0)
    graph, _ = build(spec)
    shapes = [(2, SEQ, EMBED), (EMBED, spec.width), (EMBED, spec.width), (RATE, spec.width), (DIM,)]
    arguments = [random.normal(size=shape) for shape in shapes]
    directions = [random.normal(size=shape) for shape in shapes]
    cotangent = random.normal(size=(2, len(LASTS[0]), DIM))
    windows = complete_windows(ROWS, RATE)
    np.testing.assert_array_equal(windows.last, LASTS)
    assert windows.complete.all()

    def entries(x, value, gate, bias, norm):
        state = {"value": {"kernel": value}, "gate": {"kernel": gate}, "bias": bias, "norm": norm}
        module = nnx.merge(graph, nnx.State(state))
        found = module.pool(module.project(x), windows)
        return jnp.vdot(jnp.float32(cotangent), found), found

    narrow = [jnp.asarray(each, jnp.float32) for each in arguments]
    (_, found), gradients = jax.jit(jax.value_and_grad(entries, range(5), has_aux=True))(*narrow)
    np.testing.assert_allclose(found, entries_by_hand(*arguments, overlaps), atol=3e-6, rtol=3e-6)
    ahead, behind = (
        np.vdot(
            cotangent,
            entries_by_hand(*[each + step * way for each, way in zip(arguments, directions, strict=True)], overlaps),
        )
        for step in (1e-5, -1e-5)
    )
    slope = sum(np.vdot(way, np.asarray(each, float)) for way, each in zip(directions, gradients, strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=3e-5)


def test_blocks_of_queries_attend_as_all_queries_do(monkeypatch):
    """Two blocks of 6 queries, the second with padding, over windows, two segments and selected entries.

    So does the first query without the others.
    """
    compressor = Compressor(rate=2, dim=6, rope=ROPE, overlaps=True)
    spec = CompressedAttention(
        heads=2,
        head_dim=6,
        query_rank=4,
        groups=2,
        output_rank=3,
        window=4,
        rope=ROPE,
        max_tokens=SEQ,
        compressor=compressor,
        indexer=EntryIndexer(heads=3, count=2, compressor=compressor),
    )
    graph, state = build(spec)
    x = jax.random.normal(jax.random.key(2), (2, SEQ, EMBED))

    def loss(state, x):
        output, _ = nnx.merge(graph, state)(x, ROWS, None, None)
        return jnp.sum(jnp.square(output)), output

    (_, whole), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    first, rows = x[:, :1], Rows(ROWS.positions[:, :1], ROWS.segment_ids[:, :1])  # shorter than a window of entries
    np.testing.assert_allclose(nnx.merge(graph, state)(first, rows, None, None)[0], whole[:, :1], atol=1e-6)
    monkeypatch.setattr(compressed_attention, "_BLOCK_TOKENS", 6)
    (_, parts), of_parts = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    assert np.ptp(whole) > 0.1
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    for one, other in zip(jax.tree.leaves(of_parts), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5, rtol=3e-5)
