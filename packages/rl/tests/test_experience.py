"""Batches of trajectories: targets, padding, advantages and weights, and who is left out."""

import numpy as np
import pytest

from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited_by_values


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


def batch(advantage="group", weights="token"):
    return batch_of(ROWS, shapes=batch_shapes(6, 5), advantage=advantage, weights=weights, version=3)


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
    assert (found["old_logprobs"] == np.where(drawn, -0.5, 0)).all() and (found["weights"][drawn] > 0).all()


def test_advantages_are_within_groups_and_dropped_rows_are_counted():
    found = batch()
    np.testing.assert_allclose(found["advantages"].sum(axis=1), [1.4142, -2.1213, 0, 0, 0, 0], atol=1e-4)
    np.testing.assert_allclose(found["advantages"][0], [0, 0.7071, 0.7071, 0, 0], atol=1e-4)
    assert found["real"].tolist() == [1, 1, 1, 0, 1, 0] and found["dropped"].tolist() == [0, 0, 0, 1, 0, 0]
    assert found["flat_groups"].tolist() == [0, 0, 1, 0, 1, 0]
    assert found["staleness"].tolist() == [0, 0, 0, 0, 2, 0]
    assert found["action_tokens"].tolist() == [2, 3, 2, 0, 1, 0] and found["share"].sum() == pytest.approx(1)


def test_the_arrays_are_those_that_were_announced():
    found = batch()
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in batch_shapes(6, 5).items()
    }


@pytest.mark.parametrize(
    ("weights", "sums"),
    [
        ("token", [2 / 8, 3 / 8, 2 / 8, 0, 1 / 8, 0]),
        ("sequence", [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
        ("constant", [2 / 20, 3 / 20, 2 / 20, 0, 1 / 20, 0]),
        ("prompt", [2 / 10, 3 / 10, 2 / 6, 0, 1 / 6, 0]),
        ("sum", [2, 3, 2, 0, 1, 0]),
    ],
)
def test_weights_are_of_the_whole_batch_without_padding_and_dropped_rows(weights, sums):
    found = batch(weights=weights)
    np.testing.assert_allclose(found["weights"].sum(axis=1), sums, rtol=1e-6)
    assert not found["weights"][found["targets"] == -100].any()


def test_without_an_advantage_nothing_is_credited():
    assert not batch(advantage=None)["advantages"].any()


def test_tokens_are_credited_by_what_was_expected_before_each():
    shapes = batch_shapes(6, 5, values=True)
    laid = batch_of(ROWS, shapes=shapes, advantage=None, weights="token", version=3)
    values = np.full((6, 5), 0.25)
    found = credited_by_values(laid, ROWS, values, discount=0.9, decay=0.5, whiten=False)
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        name: (each.shape, each.dtype) for name, each in shapes.items()
    }
    last = 0.25 - 0.25  # the third row's second action, which the reward follows
    first = 0.9 * 0.25 - 0.25 + 0.9 * 0.5 * last  # what was shown between the two is no step
    np.testing.assert_allclose(found["advantages"][2], [first, 0, last, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found["returns"][2], [first + 0.25, 0, last + 0.25, 0, 0], rtol=1e-6)
    drawn = found["targets"] != -100
    assert not found["returns"][~drawn].any() and not found["old_values"][~drawn].any()
    white = credited_by_values(laid, ROWS, values, discount=0.9, decay=0.5, whiten=True)
    assert white["advantages"][drawn].std() == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(white["returns"], found["returns"])
