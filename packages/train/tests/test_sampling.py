import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.config import parse
from stack_core.errors import ConfigError
from stack_train.sampling import SamplingConfig, sample

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None]


def draws(count=4000, *, temperature=1.0, top_k=0, top_p=1.0):
    """The share of each token among many draws."""
    keys = jax.random.split(jax.random.key(0), count)
    settings = {"temperature": jnp.float32(temperature), "top_k": jnp.int32(top_k), "top_p": jnp.float32(top_p)}
    tokens = jax.jit(jax.vmap(lambda key: sample(LOGITS, **settings, key=key)[0]))(keys)
    return np.bincount(np.asarray(tokens), minlength=5) / count


def test_draws_follow_the_probabilities():
    np.testing.assert_allclose(draws(), PROBABILITIES, atol=0.03)


def test_temperature_sharpens_and_zero_is_greedy():
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(draws(temperature=0.5), expected, atol=0.03)
    np.testing.assert_array_equal(draws(temperature=0), [0, 1, 0, 0, 0])


def test_top_k_keeps_the_most_likely():
    expected = np.array([0, 0.4, 0, 0.3, 0]) / 0.7
    np.testing.assert_allclose(draws(top_k=2), expected, atol=0.03)
    np.testing.assert_array_equal(draws(top_k=1), [0, 1, 0, 0, 0])
    np.testing.assert_allclose(draws(top_k=99), PROBABILITIES, atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, [1]), (0.5, [1, 3]), (0.8, [1, 3, 4]), (1.0, range(5))])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    shares = draws(top_p=top_p)
    expected = np.zeros(5)
    expected[list(kept)] = PROBABILITIES[list(kept)]
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


def test_top_p_counts_among_what_top_k_left():
    np.testing.assert_array_equal(draws(top_k=2, top_p=0.55), [0, 1, 0, 0, 0])


def test_rows_are_drawn_apart_and_greedy_takes_the_first_of_equals():
    logits = jnp.array([[0.0, 9.0, 9.0], [9.0, 0.0, 0.0]])
    settings = {"top_k": jnp.int32(0), "top_p": jnp.float32(1), "key": jax.random.key(0)}
    assert sample(logits, temperature=jnp.float32(0), **settings).tolist() == [1, 0]


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"seed": -1},
        {"stop": [""]},
    ],
)
def test_settings_out_of_range_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        parse(SamplingConfig, setting)
