"""Scores of an environment's rewards as metrics of a run."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax
import numpy as np

from stack_core.abi.data import Shapes
from stack_rl.contracts import Trajectory
from stack_rl.rewards.rubric import RubricConfig
from stack_rl.rewards.weighted import WeightedReward

__all__ = ["lay_out_parts", "part_shapes", "reward_names"]

_PREFIX: Final = "reward."


def reward_names(environment: Any) -> list[str]:
    """Returns the facts with the scores of an environment's rewards.

    Each has the name of its reward or of a criterion of a rubric, after "step." for step rewards. Environments without
    `rewards` have no such facts.
    """
    names = list(_names(getattr(environment, "rewards", ())))
    return [*names, *(f"step.{name}" for name in _names(getattr(environment, "step_rewards", ())))]


def part_shapes(environment: Any, rows: int) -> Shapes:
    """Returns the arrays of a batch for the scores of an environment's rewards, each [rows]."""
    return {
        f"{_PREFIX}{name}": jax.ShapeDtypeStruct((rows,), np.dtype(np.float32)) for name in reward_names(environment)
    }


def lay_out_parts(batch: Mapping[str, np.ndarray], row: int, trajectory: Trajectory) -> None:
    """Writes the scores of an episode to its row; 0 for a reward that did not score the episode."""
    for name in batch:
        if name.startswith(_PREFIX) and (fact := name.removeprefix(_PREFIX)) in trajectory.facts:
            batch[name][row] = trajectory.facts[fact]


def _names(rewards: Iterable[WeightedReward]) -> Iterable[str]:
    for each in rewards:
        reward = each.reward
        if isinstance(reward, Mapping):
            # Not checked yet: `check_reward` refuses a reward without a name or with other criteria.
            yield str(reward.get("name", ""))
            yield from criteria if isinstance(criteria := reward.get("criteria"), Mapping) else ()
        elif isinstance(reward, RubricConfig):
            yield from (reward.name, *reward.criteria)
        elif isinstance(reward, str):
            yield reward if reward.startswith("run:") else reward.rpartition(":")[2]
        else:
            yield str(getattr(reward, "name", getattr(reward, "__name__", type(reward).__name__)))
