"""The named losses against their formulas in NumPy, and data that do not fit them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import DataError
from stack_rl.tinker.datums import Datum, batched, checked
from stack_rl.tinker.losses import LOSSES, loss_settings

SOURCE = np.random.default_rng(3)
LOGPROBS, SAMPLED = SOURCE.normal(-2, 0.7, 40), SOURCE.normal(-2, 0.7, 40)
ADVANTAGES, WEIGHTS = SOURCE.normal(0, 1, 40), SOURCE.random(40)
RATIO = np.exp(LOGPROBS - SAMPLED)


def clipped(low, high):
    return np.clip(RATIO, low, high)


# Loss, its settings, the expected losses, and their derivatives by the log-probabilities.
CASES = [
    ("cross_entropy", {}, -WEIGHTS * LOGPROBS, -WEIGHTS),
    ("importance_sampling", {}, -RATIO * ADVANTAGES, -RATIO * ADVANTAGES),
    *[
        (
            "ppo",
            settings,
            -np.minimum(RATIO * ADVANTAGES, clipped(low, high) * ADVANTAGES),
            np.where(clipped(low, high) * ADVANTAGES >= RATIO * ADVANTAGES, -RATIO * ADVANTAGES, 0),
        )
        for settings, low, high in (
            ({}, 0.8, 1.2),
            ({"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, 0.5, 1.1),
        )
    ],
    *[
        ("cispo", settings, -clipped(low, high) * ADVANTAGES * LOGPROBS, -clipped(low, high) * ADVANTAGES)
        for settings, low, high in (({}, 0.0, 4.0), ({"clip_high_threshold": 1.2}, 0.0, 1.2))
    ],
    *[
        (
            "dro",
            settings,
            -(ADVANTAGES * LOGPROBS - beta / 2 * (LOGPROBS - SAMPLED) ** 2),
            -(ADVANTAGES - beta * (LOGPROBS - SAMPLED)),
        )
        for settings, beta in (({}, 0.05), ({"beta": 0.7}, 0.7))
    ],
]


@pytest.mark.parametrize(("name", "settings", "losses", "slopes"), CASES)
def test_a_named_loss_is_its_formula(name, settings, losses, slopes):
    inputs = {"weights": WEIGHTS, "logprobs": SAMPLED, "advantages": ADVANTAGES}
    read = {each: jnp.asarray(inputs[each], jnp.float32) for each in LOSSES[name].inputs}
    numbers = {key: jnp.float32(value) for key, value in loss_settings(name, settings).items()}
    of = lambda logprobs: LOSSES[name].token_losses(logprobs, read, numbers)
    given = jnp.asarray(LOGPROBS, jnp.float32)
    np.testing.assert_allclose(of(given), losses, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda each: of(each).sum())(given), slopes, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gspo", {}, r"no loss 'gspo'.*Known: cross_entropy.*forward_backward_custom"),
        ("ppo", {"clip": 0.2}, "'ppo' has no setting 'clip'. It has: clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "has no settings. Leave loss_fn_config out"),
        ("dro", {"beta": "much"}, "is 'much'; give a number"),
    ],
)
def test_an_unknown_loss_or_setting_is_refused(name, settings, message):
    with pytest.raises(DataError, match=message):
        loss_settings(name, settings)


GOOD = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("tokens", "inputs", "message"),
    [
        ([1, 2], {"target_tokens": [2, 3]}, "has no weights, which the loss 'cross_entropy' reads"),
        ([1, 2], {**GOOD, "advantages": [1.0, 1.0]}, "has advantages, which the loss 'cross_entropy' does not read"),
        ([1, 2, 3], GOOD, r"target_tokens has shape \[2\]; expected \[3\]"),
        ([1, 2], {**GOOD, "weights": [1.0, np.nan]}, "weights has values that are not finite"),
        ([1, 99], GOOD, "model_input has token ids from 1 to 99; expected 0 to 9"),
        ([1, 2], {**GOOD, "target_tokens": [-100, 3]}, "target_tokens has token ids from -100"),
        ([], {}, "has 0 tokens; the model takes 1 to 8"),
        ([1] * 9, {}, "has 9 tokens; the model takes 1 to 8"),
    ],
)
def test_a_datum_that_does_not_fit_is_refused_by_its_number(tokens, inputs, message):
    data = [Datum([1, 2], GOOD), Datum(tokens, inputs)]
    with pytest.raises(DataError, match=f"Datum 1:? .*{message}|Datum 1: {message}"):
        checked(data, "cross_entropy", vocab_size=10, max_tokens=8)


def test_batches_have_few_shapes_and_each_example_once():
    lengths = [*range(1, 40), 100, 100, 100, 1000, 1500]
    data = [
        Datum(np.full(length, length % 7), {"target_tokens": np.ones(length, int), "weights": np.ones(length)})
        for length in lengths
    ]
    examples = checked(data, "cross_entropy", vocab_size=10, max_tokens=1536)
    batches = list(batched(examples, max_tokens=1536))
    assert sorted(number for each in batches for number in each.members) == list(range(len(lengths)))
    shapes = {each.batch["tokens"].shape for each in batches}
    assert shapes == {(16, 16), (16, 32), (8, 64), (4, 128), (1, 1024), (1, 1536)}
    for each in batches:
        for row, number in enumerate(each.members):
            count = lengths[number]
            assert each.batch["segment_ids"][row].sum() == count == each.inputs["weights"][row].sum()
            assert (each.batch["targets"][row] == 1).sum() == count
            np.testing.assert_array_equal(each.batch["tokens"][row, :count], examples[number].tokens)
