import jax
import numpy as np
import pytest

from stack_core.ops.sampling.penalties import add_at, penalize

VOCAB, MAX_TOKENS = 60, 700
NONE = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
jitted = jax.jit(penalize)


def penalized(logits, history, prompt_tokens, length, *, repetition, frequency, presence):
    """By its definition, one row."""
    changed = logits.astype(np.float64)
    for token in set(history[:length].tolist()):
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token in history[prompt_tokens:length].tolist():
        changed[token] -= frequency
    for token in set(history[prompt_tokens:length].tolist()):
        changed[token] -= presence
    return changed


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 699, 700])
@pytest.mark.parametrize(
    "given",
    [
        {"repetition": 1.5},
        {"repetition": 0.5},
        {"frequency": 0.25},
        {"presence": 1.5},
        {"frequency": -0.5, "presence": -1.0},
        {"repetition": 1.2, "frequency": 0.1, "presence": 0.7},
    ],
)
def test_penalties_are_what_they_are_defined_to_be_in_each_row(given, length):
    rng = np.random.default_rng(length)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    history = rng.integers(0, VOCAB, size=(4, MAX_TOKENS)).astype(np.int32)
    prompt_tokens, lengths = np.int32([0, length // 2, length, 3]), np.int32([length, length, length, MAX_TOKENS])
    rows = [NONE | given] * 3 + [NONE]
    values = {name: np.float32([row[name] for row in rows]) for name in NONE}
    found = jitted(logits, history, prompt_tokens=prompt_tokens, lengths=lengths, **values)
    expected = [
        penalized(*row, **penalties)
        for *row, penalties in zip(logits, history, prompt_tokens, lengths, rows, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_biases_are_added_to_their_tokens_and_nowhere_for_none():
    logits = np.ones((2, 5), np.float32)
    tokens, values = np.int32([[4, 0, -1], [-1, -1, 2]]), np.float32([[1, -np.inf, 50], [60, 70, 3]])
    found = add_at(*map(jax.numpy.asarray, (logits, tokens, values)))
    np.testing.assert_array_equal(found, [[-np.inf, 1, 1, 1, 2], [1, 1, 4, 1, 1]])
