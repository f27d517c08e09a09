"""Choice of the task of each group."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from stack_rl.contracts import Tasks, Trajectory

__all__ = ["ChoosesTasks", "Memory", "choose_task", "permuted_task"]

Memory: TypeAlias = Mapping[str, Any]
"""State of a choice, which is JSON. It is empty at first and part of the position in the data."""


@runtime_checkable
class ChoosesTasks(Protocol):
    """`Tasks` that choose the task of each group, for example by weights or by earlier results.

    Both methods are pure, so a resumed run makes the same choices.
    """

    def choose(self, group: int, memory: Memory) -> int:
        """Returns the task of a group."""
        ...

    def learn(self, trajectories: Sequence[Trajectory], memory: Memory) -> Memory:
        """Returns the memory after a batch.

        Args:
          trajectories: all trajectories of the batch, ordered by group, without dropped ones.
          memory: memory before the batch.
        """
        ...


def choose_task(group: int, tasks: Tasks, memory: Memory, *, seed: int) -> int:
    """Returns the task of a group: the tasks' own choice, or the next one in random order."""
    return tasks.choose(group, memory) if isinstance(tasks, ChoosesTasks) else permuted_task(group, tasks, seed)


def permuted_task(number: int, tasks: Tasks, seed: int) -> int:
    """Returns a task by its number in the random order; each epoch visits all tasks in a new order."""
    if tasks.training is None:
        return number
    epoch, place = divmod(number, tasks.training)
    return int(np.random.default_rng([seed, epoch]).permutation(tasks.training)[place])
