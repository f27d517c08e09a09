"""Batches of trajectories: targets, padding, advantages and weights, and who is left out."""

from dataclasses import replace

import numpy as np
import pytest

from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited, update_batch
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.objectives.presets import DAPOConfig, DrGRPOConfig, GRPOConfig, ReinforceConfig, RLOOConfig
from stack_rl.objectives.settings import Overlong


def trajectory(group, tokens, sampled, reward, version=3):
    drawn = np.asarray(sampled, bool)
    return Trajectory(
        group=group,
        task=group,
        tokens=np.asarray(tokens, np.int32),
        sampled=drawn,
        logprobs=np.where(drawn, -0.5, 0).astype(np.float32),
        versions=np.where(drawn, version, -1).astype(np.int32),
        rewards=np.asarray([*[0] * (len(tokens) - 1), reward], np.float32),
    )


# Token 0 ends a text, and pads a row.
ROWS = [
    trajectory(4, [7, 8, 1, 0], [0, 0, 1, 1], 1.0),
    trajectory(4, [7, 8, 2, 2, 0], [0, 0, 1, 1, 1], 0.0),
    trajectory(5, [6, 3, 9, 0], [0, 1, 0, 1], 0.25),
    None,
    trajectory(5, [6, 0], [0, 1], 0.25, version=1),
]


def laid_out(algorithm: PolicyConfig, rows=ROWS):
    return batch_of(rows, shapes=batch_shapes(6, 5, algorithm), version=3)


PLAIN = DrGRPOConfig()


def batch(algorithm=PLAIN, rows=ROWS, **scores):
    found = credited(laid_out(algorithm, rows), rows, algorithm, scores)
    return update_batch(found, np.arange(6), rows, algorithm)


def test_targets_are_what_was_drawn_and_the_end_token_that_pads_is_one():
    found = batch()
    assert found["tokens"][0].tolist() == [7, 8, 1, 0, 0]
    assert found["targets"].tolist() == [
        [-100, 1, 0, -100, -100],
        [-100, 2, 2, 0, -100],
        [3, -100, 0, -100, -100],
        [-100] * 5,
        [0, -100, -100, -100, -100],
        [-100] * 5,
    ]
    assert found["segment_ids"].sum(axis=1).tolist() == [3, 4, 3, 0, 1, 0]
    assert found["positions"][1].tolist() == [0, 1, 2, 3, 0]
    drawn = found["targets"] != -100
    assert (found["behaviour_logprobs"] == np.where(drawn, -0.5, 0)).all() and (found["weights"][drawn] > 0).all()


def test_advantages_are_within_groups_and_dropped_rows_are_counted():
    found = batch(GRPOConfig())
    np.testing.assert_allclose(found["advantages"].sum(axis=1), [1.4142, -2.1213, 0, 0, 0, 0], atol=1e-4)
    np.testing.assert_allclose(found["advantages"][0], [0, 0.7071, 0.7071, 0, 0], atol=1e-4)
    assert found["real"].tolist() == [1, 1, 1, 0, 1, 0] and found["dropped"].tolist() == [0, 0, 0, 1, 0, 0]
    assert found["flat_groups"].tolist() == [0, 0, 1, 0, 1, 0]
    assert found["staleness"].tolist() == [0, 0, 0, 0, 2, 0]
    assert found["action_tokens"].tolist() == [2, 3, 2, 0, 1, 0] and found["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPOConfig(),
        DAPOConfig(target_kl=0.1),
        PPOConfig(kl=0.1, kl_in="reward", kl_estimator="k1"),
        RLOOConfig(reference="data"),
    ],
)
def test_the_arrays_are_those_that_were_announced(algorithm):
    of_tokens = dict.fromkeys(("policy_logprobs", "reference_logprobs", "values"), np.zeros((6, 5), np.float32))
    found = batch(algorithm, **of_tokens)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in batch_shapes(6, 5, algorithm).items()
    }


@pytest.mark.parametrize(
    ("aggregation", "sums"),
    [
        ("token", [2 / 8, 3 / 8, 2 / 8, 0, 1 / 8, 0]),
        ("sequence", [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
        ("sequence_sum", [2 / 4, 3 / 4, 2 / 4, 0, 1 / 4, 0]),
        ("constant", [2 / 20, 3 / 20, 2 / 20, 0, 1 / 20, 0]),
        ("prompt", [2 / 10, 3 / 10, 2 / 6, 0, 1 / 6, 0]),
        ("sum", [2, 3, 2, 0, 1, 0]),
    ],
)
def test_weights_are_of_the_whole_batch_without_padding_and_dropped_rows(aggregation, sums):
    found = batch(DrGRPOConfig(loss_aggregation=aggregation))
    np.testing.assert_allclose(found["weights"].sum(axis=1), sums, rtol=1e-6)
    assert not found["weights"][found["targets"] == -100].any()


def test_an_update_weighs_its_own_rows():
    algorithm = GRPOConfig(minibatches=3)
    whole = credited(laid_out(algorithm), ROWS, algorithm, {"policy_logprobs": np.zeros((6, 5))})
    found = update_batch(whole, np.asarray([0, 3]), ROWS, algorithm)
    np.testing.assert_allclose(found["weights"].sum(axis=1), [1, 0])
    assert found["share"].tolist() == [0.5, 0.5] and found["dropped"].tolist() == [0, 1]
    np.testing.assert_array_equal(found["tokens"], whole["tokens"][[0, 3]])


def test_tokens_are_credited_by_what_was_expected_before_each():
    algorithm = PPOConfig(gae_gamma=0.9, gae_lambda=0.5, whiten_advantages=False)
    scores = {"values": np.full((6, 5), 0.25), "policy_logprobs": np.full((6, 5), -0.75)}
    found = batch(algorithm, **scores)
    last = 0.25 - 0.25  # the third row's second action, which the reward follows
    first = 0.9 * 0.25 - 0.25 + 0.9 * 0.5 * last  # what was shown between the two is no step
    np.testing.assert_allclose(found["advantages"][2], [first, 0, last, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found["returns"][2], [first + 0.25, 0, last + 0.25, 0, 0], rtol=1e-6)
    drawn = found["targets"] != -100
    assert not found["returns"][~drawn].any() and not found["old_values"][~drawn].any()
    np.testing.assert_array_equal(found["old_logprobs"], np.where(drawn, -0.75, 0).astype(np.float32))
    white = batch(replace(algorithm, whiten_advantages=True), **scores)
    assert white["advantages"][drawn].std() == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(white["returns"], found["returns"])


def test_a_divergence_in_the_reward_is_subtracted_where_it_arises():
    """Per answer for estimators of groups, per token ahead for returns."""
    reference = np.full((6, 5), -0.75)  # the behaviour has -0.5, so k1 is 0.25 at each of a row's tokens
    rloo = batch(RLOOConfig(kl=0.4), reference_logprobs=reference)
    totals = {0: 1 - 0.4 * 0.5, 1: 0 - 0.4 * 0.75, 2: 0.25 - 0.4 * 0.5, 4: 0.25 - 0.4 * 0.25}
    np.testing.assert_allclose(rloo["advantages"][[0, 1]].max(axis=1), [totals[0] - totals[1], 0], rtol=1e-6)
    np.testing.assert_allclose(rloo["advantages"][4, 0], totals[4] - totals[2], rtol=1e-6)
    assert rloo["reward_kl"].tolist() == [0.5, 0.75, 0.5, 0, 0.25, 0]
    plain = batch(ReinforceConfig(kl=0.4), reference_logprobs=reference)
    ahead = [1 - 0.2, 1 - 0.1, -0.3, -0.2, -0.1, 0.25 - 0.2, 0.25 - 0.1, 0.25 - 0.1]
    drawn = plain["targets"] != -100
    expected = (ahead - np.mean(ahead)) / np.sqrt(np.var(ahead) + 1e-8)
    np.testing.assert_allclose(plain["advantages"][drawn], expected, rtol=1e-5)


def test_long_answers_are_charged_or_excluded():
    rows = [
        None if each is None else replace(each, limit_tokens=4, is_cut=index == 1) for index, each in enumerate(ROWS)
    ]
    charged = DrGRPOConfig(overlong=Overlong(buffer_fraction=0.5))
    found = batch(charged, rows)
    assert found["overlong"].tolist() == [0, 0.5, 0, 0, 0, 0]  # three tokens, one over half of the limit
    np.testing.assert_allclose(found["advantages"][:2].max(axis=1), [0.75, 0], rtol=1e-6)
    np.testing.assert_allclose(found["advantages"][1].min(), -0.75, rtol=1e-6)
    assert found["reward"].tolist() == [1, 0, 0.25, 0, 0.25, 0]  # the environment's
    excluded = batch(DrGRPOConfig(overlong=Overlong(kind="mask"), loss_aggregation="token"), rows)
    np.testing.assert_allclose(excluded["weights"].sum(axis=1), [2 / 5, 0, 2 / 5, 0, 1 / 5, 0], rtol=1e-6)
    assert excluded["overlong"].tolist() == [0, 1, 0, 0, 0, 0]
    unknown = batch(charged, [None if each is None else replace(each, limit_tokens=None) for each in rows])
    assert not unknown["overlong"].any()
