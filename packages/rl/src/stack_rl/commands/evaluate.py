"""`stack rl evaluate`: evaluates a model on the held-out tasks of a recipe."""

import json as json_format
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from stack_core.abi.config import Selected, load_yaml, parse
from stack_core.abi.engines import checked_engine
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.episodes import Attempt, Player
from stack_rl.rollouts import RolloutData

__all__ = ["Played", "evaluate", "played"]

Played = Mapping[str, int | float]
"""Number of tasks played, and the means of `reward`, `correct` and the facts that all episodes have in common."""


def evaluate(
    file: Path,
    run: str,
    /,
    *,
    samples: Annotated[int, Parameter(negative=())] = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Play the held-out tasks of a recipe once, greedily: stack rl evaluate examples/add.yaml runs/add-chat

    Args:
      file: the YAML file of a run whose data are rollouts.
      run: the model: a run, or another address that `stack generate` takes.
      samples: number of episodes to print as well.
      json: print the means as JSON.
    """
    from stack_core.abi.model_formats import (
        open_for_generation,  # imports jax, which would slow down `stack --help`
    )

    data = _rollouts(load_yaml(file), file)
    policy = open_for_generation(run)
    tasks = data.environment.build(policy, seq_tokens=data.seq_tokens, seed=0)
    episodes = played(data, policy, tasks)
    means = _means(episodes)
    if json:
        print(json_format.dumps(means))
        return
    for each in episodes[:samples]:
        print(f"{tasks.text(tuple(map(int, each.tokens)))}   {each.rewards.sum():.3g} {each.verdict or ''}")
    print(", ".join(f"{name} {value:,.4g}" for name, value in means.items()))


def played(data: RolloutData, policy: GenerativeCheckpoint, tasks: Tasks) -> list[Trajectory]:
    """Plays every held-out task greedily in batches of `data`, and leaves out episodes that fail.

    Raises:
      ConfigError: the environment has no held-out tasks.
      EnvironmentFailed: an environment or a reward failed and `data.on_failure` is "stop", or all episodes failed.
    """
    if not tasks.held_out:
        raise ConfigError("The environment has no held-out tasks; set data.environment.held_out.")
    engine = checked_engine(data.engine, registries.engines[data.engine](policy))
    engine.expect(min(data.batch_size, tasks.held_out))
    engine.start()
    player = Player(
        tasks, engine, seq_tokens=data.seq_tokens, on_failure=data.on_failure, timeout_s=data.step_timeout_s
    )
    found: list[Trajectory | None] = []
    try:
        for first in range(0, tasks.held_out, data.batch_size):
            numbers = range(first, min(first + data.batch_size, tasks.held_out))
            attempts = [Attempt(number, number, held_out=True) for number in numbers]
            found += player.play(attempts, seed=(0, first), greedy=True)
    finally:
        engine.close()
    episodes = [each for each in found if each is not None]
    if not episodes:
        raise EnvironmentFailed(f"All {tasks.held_out} episodes failed and were dropped; set data.on_failure to stop.")
    return episodes


def _means(episodes: Sequence[Trajectory]) -> Played:
    common = set.intersection(*(set(each.facts) for each in episodes)) if episodes else set()
    facts = {name: float(np.mean([each.facts[name] for each in episodes])) for name in sorted(common)}
    return {
        "tasks": len(episodes),
        "reward": float(np.mean([each.rewards.sum() for each in episodes])),
        "correct": float(np.mean([each.verdict == "correct" for each in episodes])),
        **facts,
    }


def _rollouts(recipe: Mapping[str, Any], file: Path) -> RolloutData:
    data = recipe.get("data")
    data = Selected(registries.data, former="kind").with_key(data, "data") if isinstance(data, Mapping) else {}
    if (name := data.get("name")) != "rollouts":
        raise ConfigError(f"{file}: data.name is {name!r}; a recipe whose data.name is 'rollouts' was expected.")
    return parse(registries.data[name], data, path="data")
