"""pass@k against all subsets of attempts, and confidence intervals against known numbers and their coverage."""

import itertools

import numpy as np
import pytest

from stack_rl.math.passing import pass_at_k, share_interval, task_interval


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_attempt():
    attempts, correct = np.asarray([5, 5, 5, 4, 6]), np.asarray([0, 1, 5, 2, 3])
    for k in (1, 2, 3, 4):
        exact = []
        for n, c in zip(attempts, correct, strict=True):
            outcomes = [True] * c + [False] * (n - c)
            exact.append(np.mean([any(each) for each in itertools.combinations(outcomes, k)]))
        np.testing.assert_allclose(pass_at_k(attempts, correct, k), exact, rtol=1e-12)


def test_pass_at_k_is_unbiased_and_finite_for_many_attempts():
    rng = np.random.default_rng(0)
    correct = rng.binomial(8, 0.2, size=20_000)
    found = pass_at_k(np.full(len(correct), 8), correct, 4).mean()
    assert found == pytest.approx(1 - 0.8**4, abs=0.01)
    # The biased estimate, from the measured share of correct attempts.
    assert np.mean(1 - (1 - correct / 8) ** 4) < found - 0.03
    assert pass_at_k(np.asarray([10_000]), np.asarray([1]), 100) == pytest.approx(0.01)


def test_fewer_attempts_than_k_are_refused():
    with pytest.raises(ValueError, match=r"pass@4 needs .* at least 4 attempts at each task; given: 3"):
        pass_at_k(np.asarray([5, 3]), np.asarray([1, 1]), 4)


def test_intervals_of_means():
    assert task_interval(np.asarray([0.5])) is None and share_interval(np.asarray([0.5])) is None
    low, high = task_interval(np.asarray([1.0, 2.0, 3.0, 6.0]))
    error = np.std([1, 2, 3, 6], ddof=1) / 2
    assert (low, high) == pytest.approx((3 - 1.959964 * error, 3 + 1.959964 * error))
    # One attempt at each of 10 tasks, 8 correct: Wilson's interval of 0.8 with n = 9, from the sample variance.
    low, high = share_interval(np.asarray([1.0] * 8 + [0.0] * 2))
    assert (low, high) == pytest.approx((0.4738, 0.9467), abs=5e-4)
    # All of 20 tasks: 1 / (1 + z^2 / 20) to 1.
    assert share_interval(np.ones(20)) == pytest.approx((0.8389, 1.0), abs=5e-5)


def test_an_interval_contains_the_rate_in_about_95_percent_of_evaluations_with_dependent_attempts():
    rng = np.random.default_rng(0)
    hits, naive = 0, 0
    for _ in range(400):
        rates = rng.beta(0.5, 0.5, size=60)  # 60 tasks, most of them easy or hard; the mean rate is 0.5
        shares = rng.binomial(8, rates) / 8
        low, high = share_interval(shares)
        hits += low <= 0.5 <= high
        error = 1.96 * np.sqrt(shares.mean() * (1 - shares.mean()) / (60 * 8))  # as if 480 attempts were independent
        naive += abs(shares.mean() - 0.5) <= error
    assert 0.92 < hits / 400 < 0.985
    assert naive / 400 < 0.75
