"""Lightning attention and its gradients in float64 against the recurrence, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.ops.kv_cache import DenseKVCache
from stack_train.nn.build import Build
from stack_train.nn.lightning import LightningAttention, recur
from stack_train.nn.residual import Norm, Rows

HEADS, DIM, SEQ = 3, 5, 131
SPEC = LightningAttention(heads=HEADS, head_dim=DIM, layers=4)
# Two documents of 70 and 50 tokens, and padding; chunks of the op have 64 tokens.
SEGMENTS = np.array([1] * 70 + [2] * 50 + [0] * (SEQ - 120))
FIRST = np.array([[place in (0, 70, 120) for place in range(SEQ)], [False] * SEQ])
VALID = np.array([[place < 117 for place in range(SEQ)], [True] * SEQ])


def operands(seq=SEQ):
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 2, seq, HEADS, DIM)) / DIM**0.5
    return query, key, value, SPEC.rates[1].astype(np.float64), random.normal(size=(2, HEADS, DIM, DIM))


def by_token(query, key, value, rates, state, *, first=None, valid=None):
    """The recurrence as in the paper, one token at a time."""
    batch, seq = query.shape[:2]
    first = np.zeros((batch, seq), bool) if first is None else first
    valid = np.ones((batch, seq), bool) if valid is None else valid

    def step(state, token):
        query, key, value, is_first, is_valid = token
        is_first, is_valid = (mask[:, None, None, None] for mask in (is_first, is_valid))
        kept = jnp.where(is_first, 0, jnp.exp(-rates)[:, None, None] * state)
        state = jnp.where(is_valid, kept + key[..., :, None] * value[..., None, :], state)
        return state, jnp.sum(state * query[..., :, None], axis=-2)

    tokens = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (query, key, value, first, valid)]
    state, outputs = jax.lax.scan(step, jnp.asarray(state), tokens)
    return jnp.moveaxis(outputs, 0, 1), state


@pytest.mark.parametrize("masks", [{}, {"first": FIRST}, {"valid": VALID}], ids=["plain", "packed", "padded"])
def test_values_and_gradients_are_the_recurrences(masks):
    with jax.enable_x64(True):
        arrays, masks = jax.tree.map(jnp.asarray, (operands(), masks))
        cotangents = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), (arrays[0], arrays[-1]))

        def results(function):
            found, vjp = jax.vjp(lambda *arrays: function(*arrays, **masks), *arrays)
            return found, vjp(cotangents)

        expected, actual = (jax.jit(lambda f=f: results(f))() for f in (by_token, recur))
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            assert other.dtype == np.float64
            np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-11)


def test_tokens_one_by_one_continue_a_state_in_float32():
    query, key, value, rates, state = operands(seq=9)
    with jax.enable_x64(True):
        expected, last = map(np.asarray, by_token(query, key, value, rates, state))
    arrays, outputs = [jnp.asarray(x, jnp.float32) for x in (query, key, value)], []
    state = jnp.asarray(state, jnp.float32)
    step = jax.jit(recur)
    for place in range(9):
        output, state = step(*(x[:, place : place + 1] for x in arrays), jnp.asarray(rates, jnp.float32), state)
        outputs.append(output)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=2e-6)


def test_rates_fall_by_half_per_eight_heads_and_with_depth():
    rates = LightningAttention(heads=16, head_dim=2, layers=5).rates
    np.testing.assert_allclose(rates[0, 1], 0.5 * (1 + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(rates[:, 0] / rates[0, 0], [1, 0.75, 0.5, 0.25, 1.25e-5], rtol=1e-4)


def test_a_layer_decays_by_its_own_rate():
    """By hand: the projections, the recurrence of each document, the norm and the gate."""
    embed, layer = 7, 2
    stacked = SPEC.build(Build(embed, 1, 0.4, 0.4, Norm(epsilon=1e-2), "float32", jax.random.key(0)))
    graph, state = nnx.split(stacked)
    module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    x = np.random.default_rng(1).normal(size=(1, SEQ, embed)).astype(np.float32)
    rows = Rows(jnp.arange(SEQ)[None], jnp.asarray(SEGMENTS)[None], layer=jnp.array(layer))
    output, _ = jax.jit(lambda module, x: module(x, rows, None, None))(module, jnp.asarray(x))

    names = ("query_key_value", "gate", "out")
    kernel = {name: np.asarray(getattr(module, name).kernel[...], np.float64) for name in names}
    sigmoid = lambda y: 1 / (1 + np.exp(-y))
    mixed = x @ kernel["query_key_value"]
    parts = (mixed * sigmoid(mixed)).reshape(1, SEQ, HEADS, 3, DIM)
    zeros = np.zeros((1, HEADS, DIM, DIM))
    with jax.enable_x64(True):
        inner, _ = by_token(*np.moveaxis(parts, 3, 0), SPEC.rates[layer].astype(np.float64), zeros, first=FIRST[:1])
    inner = np.asarray(inner).reshape(1, SEQ, -1)
    normed = inner / np.sqrt((inner**2).mean(-1, keepdims=True) + 1e-6)
    expected = (normed * sigmoid(x @ kernel["gate"])) @ kernel["out"]
    np.testing.assert_allclose(output, expected, rtol=2e-4, atol=2e-5)


def test_the_state_of_a_cache_is_float32_and_ignores_padding():
    stacked = SPEC.build(Build(7, 1, 0.4, 0.4, Norm(), "float32", jax.random.key(0)))
    graph, state = nnx.split(stacked)
    module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    specs = [[SPEC.state(1, "bfloat16")]]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 7)), jnp.float32)
    rows = Rows(jnp.tile(jnp.arange(6), (2, 1)), None, layer=jnp.array(1))

    @jax.jit
    def states(x, counts):
        cache = DenseKVCache.empty(specs, batch=2, capacity=8).expecting(counts)
        layer = jax.tree.map(lambda leaf: leaf[0], cache.layers[0][0])
        return module(x, rows, cache, layer)[1].arrays[0]

    short = states(x, jnp.array([4, 6]))
    assert short.dtype == jnp.float32 and short.shape == (2, HEADS, DIM, DIM)
    np.testing.assert_array_equal(short, states(x.at[0, 4:].set(9.0), jnp.array([4, 6])))
    assert np.abs(short[0] - states(x, jnp.array([6, 6]))[0]).max() > 1e-3
