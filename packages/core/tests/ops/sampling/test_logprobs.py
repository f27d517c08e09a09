import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from stack_core.ops.sampling.logprobs import MOST_LOGPROBS, token_logprobs

jitted = jax.jit(token_logprobs)


@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0], ids=["equal", "usual", "far apart"])
@pytest.mark.parametrize("vocab", [21, 1000, 32000])
def test_log_probabilities_are_those_of_float64(vocab, scale):
    rng = np.random.default_rng(vocab)
    logits = (scale * np.abs(rng.normal(size=(5, vocab)))).astype(np.float32)
    logits[:, 3] = -np.inf
    tokens = rng.integers(0, vocab, size=5).astype(np.int32)
    tokens[0] = np.argmax(logits[0])
    expected = log_softmax(logits.astype(np.float64), axis=1)
    found = jitted(logits, tokens)
    own = np.take_along_axis(expected, tokens[:, None], axis=1)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.logprobs, own[:, 0], rtol=1e-6, atol=2e-5)
    np.testing.assert_array_equal(found.ranks, 1 + np.sum(logits > np.take_along_axis(logits, tokens[:, None], 1), 1))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MOST_LOGPROBS]
    np.testing.assert_array_equal(found.top_tokens, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(expected, order, 1), rtol=1e-6, atol=2e-5)


def test_beyond_a_small_vocabulary_there_is_nothing():
    found = jitted(np.zeros((1, 4), np.float32), np.int32([2]))
    assert found.top_tokens[0, :4].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found.top_logprobs[0, :4], -np.log(4), rtol=1e-6)
    assert (found.top_logprobs[0, 4:] == -np.inf).all()


def test_a_token_without_probability_has_a_log_probability_of_minus_infinity():
    found = jitted(np.float32([[0, -np.inf, 1]]), np.int32([1]))
    assert found.logprobs.tolist() == [-np.inf]
    assert found.ranks.tolist() == [3]
