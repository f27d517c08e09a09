import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.ops.sampling.candidates import greedy_tokens, kth_largest, largest, padded

VALUES = np.float32([-np.inf, -3e38, -7.5, -1e-20, 0.0, 1e-20, 0.25, 3.0, 3.0000002, 3e38])
LARGEST = {count: jax.jit(largest, static_argnums=1) for count in (1, 20, 64)}
KTH, FIRST = jax.jit(kth_largest), jax.jit(greedy_tokens)


def rows_of(seed, vocab=700):
    """Rows with many ties, with few, and with one value alone."""
    rng = np.random.default_rng(seed)
    ties = rng.choice(VALUES, size=vocab)
    distinct = rng.permutation(vocab).astype(np.float32) - vocab // 2
    return padded(jnp.asarray([ties, distinct, rng.normal(size=vocab) * 9, np.full(vocab, -2.0)], jnp.float32))


@given(seed=st.integers(0, 10**6), count=st.sampled_from([1, 20, 64]))
def test_the_largest_come_in_the_order_of_a_stable_sort(seed, count):
    logits = rows_of(seed)
    values, tokens = LARGEST[count](logits, count)
    expected = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(logits), expected, axis=1))


@given(seed=st.integers(0, 10**6), k=st.lists(st.integers(0, 900), min_size=4, max_size=4))
def test_the_kth_largest_is_reached_by_k_and_those_that_equal_the_last(seed, k):
    logits = rows_of(seed)
    reached = logits >= KTH(logits, jnp.asarray(k, jnp.int32))[:, None]  # XLA takes denormal numbers for 0 on CPUs
    for row, found, count in zip(np.asarray(logits), reached, k, strict=True):
        expected = row >= (np.sort(row)[::-1][min(count, len(row)) - 1] if count else -np.inf)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("k", [63, 64, 65, 127, 128, 700, 2**31 - 1])
def test_both_ways_to_the_kth_largest_agree_where_they_meet(k):
    logits = rows_of(3)
    alone = KTH(logits, jnp.full(4, k, jnp.int32))
    beside_a_large_one = KTH(logits, jnp.asarray([k, k, k, 500], jnp.int32))
    np.testing.assert_array_equal(*((logits >= bounds[:, None])[:3] for bounds in (alone, beside_a_large_one)))


@given(seed=st.integers(0, 10**6))
def test_the_most_likely_is_the_first_of_equals(seed):
    logits = rows_of(seed)
    np.testing.assert_array_equal(FIRST(logits), np.argmax(logits, axis=1))


def test_the_most_likely_points_at_a_nan():
    logits = rows_of(0).at[1, 400].set(jnp.nan)
    assert FIRST(logits)[1] == 400


@pytest.mark.parametrize(("vocab", "expected"), [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_padding_is_never_likelier_than_a_token(vocab, expected):
    logits = padded(jnp.full((1, vocab), -3e38, jnp.bfloat16))
    assert logits.shape == (1, expected)
    assert logits.dtype == jnp.float32
    assert (logits[0, vocab:] == -jnp.inf).all()
