"""Every loss against NumPy written from its paper, in double precision; its gradient against central differences."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_rl.math import corrections, distillation, kl, policy, preference, sequences, value

RNG = np.random.default_rng(0)
SHAPE = (3, 7)
LOGPROBS = -RNG.gamma(2.0, 0.6, SHAPE)
OLD = LOGPROBS + RNG.normal(0, 0.4, SHAPE)
REFERENCE = LOGPROBS + RNG.normal(0, 0.5, SHAPE)
ADVANTAGES = RNG.normal(0, 1, SHAPE)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 3, 3, 3, 3]])
MASK = (SEGMENTS > 0) & (RNG.random(SHAPE) < 0.7)
PAIRS = -RNG.gamma(2.0, 0.6, (5, 2))
PAIR_REFERENCE = PAIRS + np.linspace(-0.7, 0.5, 10).reshape(5, 2)
SINGLE = RNG.normal(0, 2, 6)
DESIRABLE = np.array([True, False, True, True, False, False])
VOCAB = 5
LOGITS, TEACHER = RNG.normal(0, 2, (2, 3, VOCAB)), RNG.normal(0, 2, (2, 3, VOCAB))

on = jnp.asarray  # called where double precision is on


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def clipped(logprobs, low, high, dual):
    found = np.zeros(SHAPE)
    for place in np.ndindex(SHAPE):
        ratio, advantage = np.exp(logprobs[place] - OLD[place]), ADVANTAGES[place]
        kept = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        found[place] = -max(kept, dual * advantage) if dual and advantage < 0 else -kept
    return found


def of_sequences(values, reduce):
    """`reduce` of the drawn tokens of each sequence, at each of its tokens; 0 in one that has none."""
    found = np.zeros(SHAPE)
    for row, place in np.ndindex(SHAPE):
        members = MASK[row] & (SEGMENTS[row] == SEGMENTS[row, place])
        found[row, place] = reduce(values[row, members]) if members.any() else 0.0
    return found


def gspo(logprobs):
    ratio = np.exp(of_sequences(logprobs - OLD, np.mean))
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 1 - 0.03, 1 + 0.04) * ADVANTAGES)


def gspo_jax(logprobs):
    mean = sequences.sequence_mean(policy.log_ratio(logprobs, on(OLD), on(MASK)), on(MASK), on(SEGMENTS))
    return policy.clipped_loss(mean, on(ADVANTAGES), low=0.03, high=0.04)


def jsd(logits, beta, temperature):
    student, teacher = softmax(logits / temperature), softmax(TEACHER / temperature)
    mixed = beta * teacher + (1 - beta) * student
    kl_teacher = (teacher * np.log(teacher / mixed)).sum(-1)
    return beta * kl_teacher + (1 - beta) * (student * np.log(student / mixed)).sum(-1)


def kto(x, at):
    baseline = max(at.mean(), 0)
    weights = np.where(DESIRABLE, 1.1, 0.9)
    return weights * (1 - sigmoid(np.where(DESIRABLE, 1, -1) * 0.3 * (x - baseline)))


@dataclass(frozen=True)
class Case:
    """A loss of `x` in JAX and in NumPy; `held` is the loss where what the gradient passes over stays as at `at`."""

    name: str
    x: np.ndarray
    ours: Callable
    expected: Callable
    held: Callable | None = None


def ratio_of(logprobs):
    return np.exp(logprobs - OLD)


CASES = [
    Case("reinforce", LOGPROBS, lambda x: policy.reinforce_loss(x, on(ADVANTAGES)), lambda x: -ADVANTAGES * x),
    *(
        Case(
            f"clip {low} {high} {dual}",
            LOGPROBS,
            lambda x, low=low, high=high, dual=dual: policy.clipped_loss(
                x - on(OLD), on(ADVANTAGES), low=low, high=high, dual=dual
            ),
            lambda x, low=low, high=high, dual=dual: clipped(x, low, high, dual),
        )
        for low, high, dual in [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.1, 1.3)]
    ),
    Case("gspo", LOGPROBS, gspo_jax, gspo),
    Case(
        "cispo",
        LOGPROBS,
        lambda x: policy.cispo_loss(x, x - on(OLD), on(ADVANTAGES), lowest=0.5, highest=1.2),
        lambda x: -np.clip(ratio_of(x), 0.5, 1.2) * ADVANTAGES * x,
        lambda x, at: -np.clip(ratio_of(at), 0.5, 1.2) * ADVANTAGES * x,
    ),
    Case(
        "truncate",
        LOGPROBS,
        lambda x: corrections.truncate(x - on(OLD), cap=1.2) * x,
        lambda x: np.minimum(ratio_of(x), 1.2) * x,
        lambda x, at: np.minimum(ratio_of(at), 1.2) * x,
    ),
    Case(
        "mask",
        LOGPROBS,
        lambda x: corrections.mask(x - on(OLD), low=0.8, high=1.2) * x,
        lambda x: np.where(abs(ratio_of(x) - 1) <= 0.2, ratio_of(x), 0) * x,
        lambda x, at: np.where(abs(ratio_of(at) - 1) <= 0.2, ratio_of(at), 0) * x,
    ),
    Case(
        "sequence product",
        LOGPROBS,
        lambda x: corrections.leveled(x - on(OLD), on(MASK), on(SEGMENTS), "sequence_product"),
        lambda x: of_sequences(x - OLD, np.sum),
    ),
    Case("k1", LOGPROBS, lambda x: kl.k1(x, on(REFERENCE)), lambda x: x - REFERENCE),
    Case("k2", LOGPROBS, lambda x: kl.k2(x, on(REFERENCE)), lambda x: (x - REFERENCE) ** 2 / 2),
    Case("k3", LOGPROBS, lambda x: kl.k3(x, on(REFERENCE)), lambda x: np.exp(REFERENCE - x) - 1 - (REFERENCE - x)),
    Case(
        "corrected k3",
        LOGPROBS,
        lambda x: kl.corrected(kl.k3(x, on(REFERENCE)), x - on(OLD)),
        lambda x: ratio_of(x) * (np.exp(REFERENCE - x) - 1 - (REFERENCE - x)),
    ),
    Case(
        "value",
        LOGPROBS,
        lambda x: value.value_loss(x, on(OLD), on(ADVANTAGES), clip=0.2),
        lambda x: 0.5 * np.maximum((x - ADVANTAGES) ** 2, (np.clip(x, OLD - 0.2, OLD + 0.2) - ADVANTAGES) ** 2),
    ),
    Case(
        "value without a clip",
        LOGPROBS,
        lambda x: value.value_loss(x, on(OLD), on(ADVANTAGES), clip=None),
        lambda x: (x - ADVANTAGES) ** 2 / 2,
    ),
    Case(
        "dpo",
        PAIRS,
        lambda x: preference.dpo_loss(preference.dpo_margin(x, on(PAIR_REFERENCE), beta=0.3), label_smoothing=0.1),
        lambda x: (
            -0.9 * np.log(sigmoid(0.3 * (x - PAIR_REFERENCE) @ [1, -1]))
            - 0.1 * np.log(sigmoid(0.3 * (x - PAIR_REFERENCE) @ [-1, 1]))
        ),
    ),
    Case("ipo", SINGLE, lambda x: preference.ipo_loss(x, beta=0.3), lambda x: (x - 1 / 0.6) ** 2),
    Case(
        "orpo",
        PAIRS,
        lambda x: preference.orpo_loss(x, weight=0.4),
        lambda x: (
            -x[:, 0]
            - 0.4
            * np.log(
                sigmoid(
                    np.log(np.exp(x[:, 0]) / (1 - np.exp(x[:, 0]))) - np.log(np.exp(x[:, 1]) / (1 - np.exp(x[:, 1])))
                )
            )
        ),
    ),
    Case(
        "simpo",
        PAIRS,
        lambda x: preference.simpo_loss(x, beta=2.5, gamma=0.7),
        lambda x: -np.log(sigmoid(2.5 * (x[:, 0] - x[:, 1]) - 0.7)),
    ),
    Case(
        "kto",
        SINGLE,
        lambda x: preference.kto_loss(
            x,
            on(DESIRABLE),
            preference.kto_baseline(x, jnp.ones(6)),
            beta=0.3,
            desirable_weight=1.1,
            undesirable_weight=0.9,
        ),
        lambda x: kto(x, x),
        kto,
    ),
    Case(
        "reward",
        PAIRS,
        lambda x: preference.reward_loss(x, margin=0.3, centre=0.01),
        lambda x: -np.log(sigmoid(x[:, 0] - x[:, 1] - 0.3)) + 0.01 * (x[:, 0] + x[:, 1]) ** 2,
    ),
    Case(
        "forward kl",
        LOGITS,
        lambda x: distillation.forward_kl(x, on(TEACHER), temperature=2.0),
        lambda x: 4 * (softmax(TEACHER / 2) * np.log(softmax(TEACHER / 2) / softmax(x / 2))).sum(-1),
    ),
    Case(
        "reverse kl",
        LOGITS,
        lambda x: distillation.reverse_kl(x, on(TEACHER), temperature=2.0),
        lambda x: 4 * (softmax(x / 2) * np.log(softmax(x / 2) / softmax(TEACHER / 2))).sum(-1),
    ),
    Case(
        "jsd",
        LOGITS,
        lambda x: distillation.generalized_jsd(x, on(TEACHER), beta=0.3, temperature=1.5),
        lambda x: jsd(x, 0.3, 1.5),
    ),
]


def central_differences(function: Callable, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * step
            ends.append(function(moved).sum())
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loss_is_that_of_its_paper_and_so_is_its_gradient(case: Case) -> None:
    held = case.held or (lambda x, at: case.expected(x))
    with jax.enable_x64(True):
        x = jnp.asarray(case.x)
        found, gradient = case.ours(x), jax.grad(lambda x: jnp.sum(case.ours(x)))(x)
        assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, case.expected(case.x), rtol=1e-6)
    expected = central_differences(lambda x: held(x, case.x), case.x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_the_cases_reach_every_side_of_a_clip() -> None:
    ratio, positive = ratio_of(LOGPROBS), ADVANTAGES > 0
    for side in (
        positive & (ratio > 1.28),
        positive & (ratio < 1),
        ~positive & (ratio < 0.8),
        ~positive & (ratio > 1.3),
    ):
        assert side.any()
    found = policy.is_clipped(on(LOGPROBS - OLD), on(ADVANTAGES), low=0.2, high=0.28)
    np.testing.assert_array_equal(found, (positive & (ratio > 1.28)) | (~positive & (ratio < 0.8)))


def test_what_padding_holds_reaches_neither_loss_nor_gradient() -> None:
    logprobs = jnp.array([-1.0, jnp.nan, jnp.inf])
    mask = jnp.array([True, False, False])

    def loss(logprobs):
        return jnp.sum(policy.clipped_loss(policy.log_ratio(logprobs, -jnp.ones(3), mask), jnp.ones(3)))

    np.testing.assert_array_equal(jax.grad(loss)(logprobs), [-1.0, 0.0, 0.0])


def test_log_ratios_that_would_overflow_are_cut_off() -> None:
    far = policy.log_ratio(jnp.array([0.0, -1e4]), jnp.array([-1e4, 0.0]), jnp.array([True, True]))
    np.testing.assert_array_equal(far, [20.0, -20.0])


def test_k1_has_no_expected_gradient_and_is_refused_as_a_loss() -> None:
    """Over all tokens of a distribution: k2's expected gradient is that of the KL divergence, k1's is 0."""
    logits, reference = jnp.asarray(LOGITS[0, 0]), jax.nn.log_softmax(jnp.asarray(TEACHER[0, 0]))

    def expected(estimator, logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(jax.lax.stop_gradient(logprobs)) * estimator(logprobs, reference))

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

    with jax.enable_x64(True):
        truth = jax.grad(divergence)(logits)
        np.testing.assert_allclose(jax.grad(lambda x: expected(kl.k1, x))(logits), np.zeros(VOCAB), atol=1e-7)
        np.testing.assert_allclose(jax.grad(lambda x: expected(kl.k2, x))(logits), truth, rtol=1e-5)
        assert np.abs(jax.grad(lambda x: expected(kl.k3, x))(logits) - truth).max() > 1e-2
    with pytest.raises(ConfigError, match="whose expectation is zero"):
        kl.estimator_in_loss("k1")
    with pytest.raises(ConfigError, match="no KL estimator 'k4'"):
        kl.estimator_in_loss("k4")


def test_sequences_left_behind_are_masked_only_where_they_were_bad() -> None:
    log_ratio = jnp.array([[-1.0, -1.0, -1.0, -1.0, 0.1, 0.1]])
    advantages, segments = jnp.array([[-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]]), jnp.array([[1, 1, 2, 2, 3, 3]])
    found = corrections.off_policy_mask(log_ratio, advantages, segments > 0, segments, threshold=0.5)
    np.testing.assert_array_equal(found, [[0, 0, 1, 1, 1, 1]])


def test_the_effective_share_is_one_on_policy_and_that_of_one_token_where_it_outweighs_all() -> None:
    mask = jnp.array([True, True, True, True, False])
    assert corrections.effective_share(jnp.zeros(5), mask) == 1
    assert corrections.effective_share(jnp.array([20.0, 0, 0, 0, 50]), mask) == pytest.approx(0.25, rel=1e-5)
    assert corrections.effective_share(jnp.zeros(5), jnp.zeros(5, bool)) == 0


def test_log_probabilities_near_zero_keep_orpo_finite() -> None:
    pairs = jnp.array([[-1e-6, -5.0], [-80.0, -1e-6], [0.0, 0.0]])
    assert np.isfinite(preference.orpo_loss(pairs)).all()
    assert np.isfinite(jax.grad(lambda x: jnp.sum(preference.orpo_loss(x)))(pairs)).all()
