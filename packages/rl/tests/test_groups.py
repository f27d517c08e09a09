"""Groups as bytes, and the ledger of those that were used."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.errors import DataError
from stack_core.abi.generation import PromptImage
from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.groups import Group, Ledger
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.sampling import PolicySampling


def trajectory(group=0, tokens=(5, 6, 7), version=3, reward=0.5):
    count = len(tokens)
    return Trajectory(
        group=group,
        task=2,
        tokens=np.asarray(tokens, np.int32),
        sampled=np.arange(count) > 0,
        logprobs=np.linspace(-1, 0, count, dtype=np.float32),
        versions=np.where(np.arange(count) > 0, version, -1).astype(np.int32),
        rewards=np.linspace(0, reward, count, dtype=np.float32),
        verdict="correct",
        is_truncated=True,
        facts={"exact": 0.1},
    )


def same(left, right):
    assert (left.group, left.task, left.verdict, left.is_truncated, left.facts) == (
        (right.group, right.task, right.verdict, right.is_truncated, right.facts)
    )
    for name in ("tokens", "sampled", "logprobs", "versions", "rewards"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name


def test_a_group_is_read_as_it_was_written():
    written = Group(7, 2, "abcd", [trajectory(7), None, trajectory(7, tokens=(1, 2))])
    read = Group.from_bytes(7, written.to_bytes())
    assert (read.number, read.version, read.digest, read.newest) == (7, 2, "abcd", 3)
    first, dropped, last = read.trajectories
    assert dropped is None
    for ours, theirs in zip((first, last), (written.trajectories[0], written.trajectories[2]), strict=True):
        same(ours, theirs)
    assert Group.from_bytes(1, Group(1, 4, "", [None]).to_bytes()).newest == 4


def test_the_images_of_a_group_are_written_once_and_read_as_they_were():
    grid = PromptImage(1, 2, np.arange(6, dtype=np.uint8).reshape(2, 3), b"one", "axes", (1, 2))
    square = PromptImage(0, 4, np.full((50, 50, 3), 7, np.uint8), b"two", "whole")
    attempts = [
        replace(trajectory(), images=(grid, square)),
        None,
        replace(trajectory(), images=(replace(square, start=2),)),
    ]
    written = Group(7, 2, "abcd", attempts).to_bytes()
    assert 7500 < len(written) < 2 * 7500
    first, _, last = Group.from_bytes(7, written).trajectories
    for ours, theirs in zip((first, last), (attempts[0], attempts[2]), strict=True):
        same(ours, theirs)
        for read, image in zip(ours.images, theirs.images, strict=True):
            assert (read.start, read.tokens, read.digest) == (image.start, image.tokens, image.digest)
            assert (read.layout, read.grid, read.pixels.dtype) == (image.layout, image.grid, np.uint8)
            assert read.pixels.tolist() == image.pixels.tolist()


def test_a_group_of_a_journal_without_later_fields_has_their_defaults():
    group = Group(7, 2, "abcd", [replace(trajectory(7), action_starts=(1,), parsed="5", is_cut=True)])
    line, newline, arrays = group.to_bytes().partition(b"\n")
    head = json.loads(line)
    for name in ("is_cut", "limit_tokens", "action_starts", "parsed", "images"):
        del head["trajectories"][0][name]
    del head["images"]
    (read,) = Group.from_bytes(7, json.dumps(head).encode() + newline + arrays).trajectories
    same(read, group.trajectories[0])
    assert (read.is_cut, read.limit_tokens, read.action_starts, read.parsed) == (False, None, (), None)
    sampling = PolicySampling(presence_penalty=0.5)
    shapes = batch_shapes(1, 3, GRPOConfig(), sampling=sampling)
    batch = batch_of([read], shapes=shapes, version=3, sampling=sampling)
    assert batch["truncated"][0] == 1 and batch["generated_tokens"][0].tolist() == [1, 2, 0]


@given(st.permutations(range(12)), st.integers(0, 12))
def test_the_ledger_knows_what_was_used_after_it_was_saved(order, cut):
    ledger = Ledger()
    for number in order[:cut]:
        ledger.use([number])
    again = Ledger()
    again.restore(json.loads(json.dumps(ledger.state())))
    assert again == ledger and again.batches == cut
    unused = again.unused()
    left = [next(unused) for _ in range(15 - cut)]
    assert left == sorted(set(range(15)) - set(order[:cut]))
    assert again.frontier == left[0] and not any(each < again.frontier for each in again.beyond)


def test_a_group_cannot_be_used_twice():
    ledger = Ledger()
    ledger.use([0, 2])
    with pytest.raises(DataError, match="Group 2 would be trained on twice; batch 1 holds it again"):
        ledger.use([1, 2])
