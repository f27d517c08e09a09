"""Stored groups that replace groups with equal rewards."""

import numpy as np
import pytest

from stack_core.abi.errors import DataError
from stack_rl.contracts import Trajectory
from stack_rl.groups import Group
from stack_rl.replay import ReplayBuffer, ReplayFiles


def group(number, *rewards):
    return Group(number, 0, "same:0", [trajectory(number, each) for each in rewards])


def trajectory(number, reward):
    return Trajectory(
        group=number,
        task=number,
        tokens=np.array([5, 6], np.int32),
        sampled=np.array([False, True]),
        logprobs=np.array([0, -1], np.float32),
        versions=np.array([-1, 0], np.int32),
        rewards=np.array([0, reward], np.float32),
    )


def varied(*numbers):
    return [group(number, 0, 1) for number in numbers]


def flat(*numbers):
    return [group(number, 1, 1) for number in numbers]


def numbers(groups):
    return [each.number for each in groups]


def test_the_newest_stored_groups_replace_flat_ones_once():
    found, buffer = ReplayBuffer(3).replace_flat([*varied(0, 1), *flat(2), *varied(3, 4)])
    assert numbers(found) == [0, 1, 2, 3, 4] and numbers(buffer.groups) == [1, 3, 4]
    found, buffer = buffer.replace_flat([*flat(5, 6), *varied(7)])
    assert numbers(found) == [3, 4, 7] and numbers(buffer.groups) == [1, 7]
    found, buffer = buffer.replace_flat(flat(8, 9, 10))
    assert numbers(found) == [1, 7, 8] and not buffer.groups


def test_a_buffer_of_size_zero_stores_nothing():
    found, buffer = ReplayBuffer().replace_flat([*varied(0), *flat(1)])
    assert numbers(found) == [0, 1] and not buffer.groups


def test_files_keep_the_buffer_of_each_checkpoint(tmp_path):
    files, of_other_process = ReplayFiles(tmp_path), ReplayFiles(tmp_path, 1)
    for step in (2, 4, 6):
        for each in (files, of_other_process):
            each.save(step, ReplayBuffer(4, (*varied(step), *varied(step + 1))))
    files.keep(4, [4])
    names = [sorted(each.stem for each in (tmp_path / "replay" / place).iterdir()) for place in "01"]
    assert names == [["00000004", "00000006"], ["00000002", "00000004", "00000006"]]
    read = files.load(4, size=4, settings="same:")
    assert numbers(read.groups) == [4, 5] and read.groups[0].rewards == [0, 1]
    assert numbers(files.load(4, size=1, settings="same:").groups) == [5]
    assert not files.load(4, size=4, settings="other:").groups
    with pytest.raises(DataError, match=r"00000002.groups with the groups to replay is missing.*--allow data.replay"):
        files.load(2, size=4, settings="same:")
