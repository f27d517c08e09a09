"""Advantages and weights, which the host computes, against loops over episodes and tokens."""

import numpy as np
import pytest

from stack_rl.math import advantages
from stack_rl.math.weights import WEIGHTS, token_weights

RNG = np.random.default_rng(0)
GROUPS = np.array([4, 9, 4, 4, 9, 2, 4])  # of four, two and one
REWARDS = RNG.normal(0, 1, 7)
LENGTHS = np.array([3, 1, 0, 7, 2, 5, 4])


def of_group(name: str, reward: float, rewards: np.ndarray) -> float:
    if len(rewards) == 1:
        return 0.0
    others = (rewards.sum() - reward) / (len(rewards) - 1)
    return {
        "centred": reward - rewards.mean(),
        "leave_one_out": reward - others,
        "group": (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6),
    }[name]


@pytest.mark.parametrize("name", ["centred", "leave_one_out", "group"])
def test_an_episode_is_compared_with_its_group(name: str) -> None:
    expected = [of_group(name, reward, REWARDS[group == GROUPS]) for reward, group in zip(REWARDS, GROUPS, strict=True)]
    np.testing.assert_allclose(advantages.ADVANTAGES[name](REWARDS, GROUPS), expected, rtol=1e-6, atol=1e-12)


def test_whitened_advantages_have_unit_size_over_the_batch_and_no_mean_in_a_group() -> None:
    found = advantages.whitened(REWARDS, GROUPS)
    assert np.mean(found**2) == pytest.approx(1, rel=1e-6)
    for group in np.unique(GROUPS):
        assert found[group == GROUPS].mean() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_equal_rewards_credit_nobody_and_are_found(name: str) -> None:
    rewards, groups = np.array([0.1, 0.1, 0.1, 0.0, 1.0]), np.array([0, 0, 0, 1, 1])
    found = advantages.ADVANTAGES[name](rewards, groups)
    np.testing.assert_allclose(found[:3], 0, atol=1e-9)
    assert (found[3] < 0) and (found[4] > 0)
    np.testing.assert_array_equal(advantages.equal_groups(rewards, groups), [True, True, True, False, False])
    np.testing.assert_array_equal(advantages.ADVANTAGES[name](rewards[:0], groups[:0]), [])


def test_overlong_answers_are_charged_by_token() -> None:
    lengths = np.array([1, 80, 90, 100, 120])
    np.testing.assert_allclose(
        advantages.overlong(lengths, max_tokens=100, buffer_tokens=20), [0, 0, -0.5, -1, -1], atol=1e-12
    )


def test_gae_skips_what_the_policy_did_not_draw() -> None:
    """A row with observations between its tokens is credited as the row of its tokens alone, by the paper's sum."""
    mask = np.array([[False, True, True, False, False, True, True, False]])
    values, rewards = RNG.normal(0, 1, mask.shape), RNG.normal(0, 1, mask.shape)
    discount, decay = 0.9, 0.8
    drawn_values, drawn_rewards = np.append(values[mask], 0), rewards[mask]
    deltas = drawn_rewards + discount * drawn_values[1:] - drawn_values[:-1]
    expected = [
        sum((discount * decay) ** later * delta for later, delta in enumerate(deltas[first:]))
        for first in range(len(deltas))
    ]
    found = advantages.gae(rewards, values, mask, discount=discount, decay=decay)
    np.testing.assert_allclose(found[mask], expected, rtol=1e-6)
    assert not found[~mask].any()


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float32])
def test_credit_is_computed_in_double_precision_from_any_dtype(dtype) -> None:
    """Integer values gave integer advantages (0.95 became 0), and two half-precision rewards of 60,000 infinity."""
    mask, large = np.ones((1, 3), bool), dtype(60_000)
    values, rewards = np.array([[0, 1, 1]]).astype(dtype), np.array([[0, 0, large]], dtype)
    wide = rewards.astype(np.float64), values.astype(np.float64)
    np.testing.assert_array_equal(advantages.gae(rewards, values, mask), advantages.gae(*wide, mask))
    group, two = np.zeros(2, int), np.array([large, large], dtype)
    for name, function in advantages.ADVANTAGES.items():
        np.testing.assert_array_equal(function(two, group), [0, 0], err_msg=name)
    charged = advantages.kl_to_go(np.array([1], dtype), np.full((1, 3), large), mask, coefficient=0.5)
    np.testing.assert_array_equal(charged, 1 - 0.5 * float(large) * np.array([[3, 2, 1]]))
    far = advantages.distilled(np.full((1, 3), large), -np.full((1, 3), large, np.float64), mask)
    np.testing.assert_array_equal(far, np.full((1, 3), -2.0 * float(large)))
    np.testing.assert_allclose(advantages.whitened_tokens(values, mask), advantages.whitened_tokens(wide[1], mask))


def test_kl_is_charged_from_each_token_on_and_distillation_at_the_token() -> None:
    mask, k1 = np.array([[True, False, True, True]]), np.array([[0.1, 9.0, 0.2, 0.3]])
    found = advantages.kl_to_go(np.array([1.0]), k1, mask, coefficient=0.5)
    np.testing.assert_allclose(found, [[1 - 0.3, 0, 1 - 0.25, 1 - 0.15]], rtol=1e-6)
    found = advantages.distilled(k1, np.zeros_like(k1), mask, coefficient=2.0)
    np.testing.assert_allclose(found, [[-0.2, 0, -0.4, -0.6]], rtol=1e-6)


def test_weights_sum_to_what_their_aggregation_says() -> None:
    values = [RNG.normal(0, 1, length) for length in LENGTHS]
    tokens = np.concatenate(values)
    means = [each.mean() for each in values if len(each)]
    of_prompts = [
        np.concatenate([each for each, other in zip(values, GROUPS, strict=True) if other == group])
        for group in np.unique(GROUPS)
    ]
    expected = {
        "token": tokens.mean(),
        "sequence": np.mean(means),
        "constant": np.sum(tokens) / (7 * 8),
        "prompt": np.mean([each.mean() for each in of_prompts]),
        "sequence_sum": tokens.sum() / len(means),  # of the sequences with tokens
        "sum": tokens.sum(),
    }
    assert set(expected) == set(WEIGHTS)
    for name, value in expected.items():
        weights = token_weights(name, LENGTHS, GROUPS, max_tokens=8)
        found = sum(weight * each.sum() for weight, each in zip(weights, values, strict=True))
        assert found == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_batch_without_a_token_weighs_nothing_infinite(name: str) -> None:
    assert np.isfinite(token_weights(name, np.zeros(3, int), np.array([0, 0, 1]), max_tokens=4)).all()
    assert len(token_weights(name, np.zeros(0, int), np.zeros(0, int), max_tokens=4)) == 0


def test_whitened_tokens_have_mean_0_and_variance_1_where_they_were_drawn() -> None:
    values, mask = RNG.normal(3, 2, (4, 6)), RNG.random((4, 6)) < 0.6
    drawn = values[mask]
    found = advantages.whitened_tokens(values, mask)
    np.testing.assert_allclose(found[mask], (drawn - drawn.mean()) / drawn.std(), rtol=1e-6)
    assert not found[~mask].any()
    assert not advantages.whitened_tokens(values, np.zeros_like(mask)).any()
