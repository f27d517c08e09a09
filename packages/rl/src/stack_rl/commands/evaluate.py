"""`stack rl evaluate`: evaluates a model on the held-out tasks of a recipe."""

import json as json_format
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from stack_core.abi.config import Selected, load_yaml, parse
from stack_core.abi.engines import checked_engine
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.episodes import Attempt, Player
from stack_rl.math.passing import pass_at_k, share_interval, task_interval
from stack_rl.rollouts import RolloutData

__all__ = ["Evaluation", "TaskResult", "evaluate", "played", "summarized"]

_LARGEST_SEED: Final = 2**63


@dataclass(frozen=True)
class TaskResult:
    """Attempts at one task.

    Attributes:
      task: name of the task.
      attempts: number of attempts, without dropped ones.
      correct: number of correct attempts; None if the environment checks no answers.
      reward: mean reward.
      tokens: mean number of sampled tokens.
      unparsed, truncated: numbers of attempts whose answer was not parsed, and that a token limit cut.
    """

    task: str
    attempts: int
    correct: int | None
    reward: float
    tokens: float
    unparsed: int
    truncated: int


@dataclass(frozen=True)
class Evaluation:
    """Results of all tasks.

    Attributes:
      means: number of tasks and of episodes, and the means of `reward`, `correct` and the facts of all episodes. A mean
        over attempts is the mean of the tasks' means.
      intervals: 95% confidence intervals of "reward" and "correct" over tasks, see `task_interval`, `share_interval`.
      pass_at: pass@k by k, the mean over tasks with at least k attempts; empty if the environment checks no answers.
      tasks: results of each task.
    """

    means: Mapping[str, int | float]
    intervals: Mapping[str, tuple[float, float]]
    pass_at: Mapping[int, float]
    tasks: Sequence[TaskResult]


def evaluate(  # noqa: PLR0913, each parameter is an option of the command
    file: Path,
    run: str,
    /,
    *,
    attempts: Annotated[int, Parameter(negative=())] = 1,
    k: Annotated[tuple[int, ...], Parameter(negative=(), consume_multiple=True)] = (),
    temperature: float | None = None,
    seed: int = 0,
    per_task: Annotated[bool, Parameter(negative=())] = False,
    samples: Annotated[int, Parameter(negative=(), validator=Number(gte=0))] = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Play the held-out tasks of a recipe: stack rl evaluate examples/add.yaml runs/add-chat --attempts 8

    A single attempt at each task is greedy. Several are sampled with the recipe's settings, and give pass@k, the
    probability that at least one of k attempts is correct, and avg@attempts, the mean over all, with 95% confidence
    intervals over tasks.

    Args:
      file: the YAML file of a run whose data are rollouts.
      run: the model: a run, or another address that `stack generate` takes.
      attempts: number of attempts at each task.
      k: values of k; by default the powers of two up to `attempts`.
      temperature: temperature of the sampling instead of the recipe's; 0 is greedy and allows one attempt.
      seed: seed of the sampling.
      per_task: print a table of the tasks.
      samples: number of episodes to print as well.
      json: print everything as JSON, with the results of each task.
    """
    from stack_core.abi.model_formats import (
        open_for_generation,  # imports jax, which would slow down `stack --help`
    )

    greedy = attempts == 1 and not temperature
    _check_options(attempts, k, temperature, seed)
    data = _rollouts(load_yaml(file), file)
    data = data if greedy or temperature is None else replace(data, temperature=temperature)
    policy = open_for_generation(run)
    tasks = data.environment.build(policy, seq_tokens=data.seq_tokens, seed=0)
    episodes = played(data, policy, tasks, attempts=attempts, seed=seed, greedy=greedy)
    found = summarized(episodes, tasks, k or tuple(1 << power for power in range(attempts.bit_length())))
    if json:
        whole = {**found.means, "intervals": found.intervals, "pass_at": found.pass_at}
        print(json_format.dumps({**whole, "per_task": [asdict(each) for each in found.tasks]}))
        return
    for each in episodes[:samples]:
        print(f"{tasks.text(tuple(map(int, each.tokens)))}   {each.rewards.sum():.3g} {each.verdict or ''}")
    if per_task:
        print("\n".join(_table(found.tasks)))
    print(_line(found, attempts))


def _check_options(attempts: int, k: Sequence[int], temperature: float | None, seed: int) -> None:
    """Raises a ConfigError if options contradict each other."""
    if attempts < 1 or not 0 <= seed < _LARGEST_SEED:
        raise ConfigError(f"--attempts is {attempts} and --seed is {seed}; give at least 1 attempt and a seed from 0.")
    if temperature is not None and (temperature < 0 or not math.isfinite(temperature)):
        raise ConfigError(f"--temperature is {temperature}; give a number of at least 0.")
    if temperature == 0 and attempts > 1:
        raise ConfigError(
            f"--temperature 0 is greedy, so all {attempts} attempts at a task would be the same. Leave out --attempts, "
            "or raise the temperature."
        )
    if k and (min(k) < 1 or max(k) > attempts):
        raise ConfigError(f"--k is {' '.join(map(str, k))}; pass@k needs 1 <= k <= {attempts}. Raise --attempts.")


def played(
    data: RolloutData,
    policy: GenerativeCheckpoint,
    tasks: Tasks,
    *,
    attempts: int = 1,
    seed: int = 0,
    greedy: bool = True,
) -> list[Trajectory]:
    """Plays the held-out tasks in batches of `data`, and leaves out episodes that fail.

    Args:
      attempts: number of attempts at each task.
      seed: seed of the sampling.
      greedy: use greedy decoding instead of the sampling settings of `data`.

    Returns:
      Episodes whose `group` is the number of the task, ordered by task.

    Raises:
      ConfigError: the environment has no held-out tasks.
      EnvironmentFailed: an environment or a reward failed and `data.on_failure` is "stop", or all episodes failed.
    """
    if not tasks.held_out:
        raise ConfigError("The environment has no held-out tasks; set data.environment.held_out.")
    engine = checked_engine(data.engine, registries.engines[data.engine](policy))
    numbers = [task for task in range(tasks.held_out) for _ in range(attempts)]
    engine.expect(min(data.batch_size, len(numbers)))
    engine.start()
    player = Player(
        tasks,
        engine,
        seq_tokens=data.seq_tokens,
        on_failure=data.on_failure,
        timeout_s=data.step_timeout_s,
        policy_sampling=data.policy_sampling,
    )
    found: list[Trajectory | None] = []
    try:
        for first in range(0, len(numbers), data.batch_size):
            batch = [Attempt(task, task, held_out=True) for task in numbers[first : first + data.batch_size]]
            found += player.play(batch, seed=(seed, first), greedy=greedy)
    finally:
        engine.close()
    episodes = [each for each in found if each is not None]
    if not episodes:
        raise EnvironmentFailed(f"All {len(numbers)} episodes failed and were dropped; set data.on_failure to stop.")
    return episodes


def summarized(episodes: Sequence[Trajectory], tasks: Tasks, k: Sequence[int]) -> Evaluation:
    """Computes the results of episodes that `played` returned.

    Args:
      episodes: at least one episode.
      tasks: the tasks, which provide names.
      k: values of k for pass@k.
    """
    by_task: dict[int, list[Trajectory]] = {}
    for each in episodes:
        by_task.setdefault(each.task, []).append(each)
    is_checked = any(each.verdict is not None for each in episodes)
    results = [
        _result(tasks.name(task, held_out=True), by_task[task], is_checked=is_checked) for task in sorted(by_task)
    ]
    rewards = np.asarray([each.reward for each in results])
    counts = np.asarray([each.attempts for each in results])
    correct = np.asarray([each.correct or 0 for each in results])
    common = set.intersection(*(set(each.facts) for each in episodes))
    means = {
        "tasks": len(results),
        "episodes": len(episodes),
        "reward": float(rewards.mean()),
        "correct": float(np.mean(correct / counts)),
        "unparsed": float(np.mean([each.unparsed / each.attempts for each in results])),
        "truncated": float(np.mean([each.truncated / each.attempts for each in results])),
        **{
            name: float(np.mean([np.mean([each.facts[name] for each in several]) for several in by_task.values()]))
            for name in sorted(common)
        },
    }
    intervals = {"reward": task_interval(rewards), "correct": share_interval(correct / counts) if is_checked else None}
    # A task with dropped attempts may have too few for the largest k.
    enough = {each: counts >= each for each in sorted(set(k))} if is_checked else {}
    return Evaluation(
        means=means,
        intervals={name: each for name, each in intervals.items() if each is not None},
        pass_at={
            each: float(pass_at_k(counts[there], correct[there], each).mean())
            for each, there in enough.items()
            if there.any()
        },
        tasks=results,
    )


def _result(name: str, episodes: Sequence[Trajectory], *, is_checked: bool) -> TaskResult:
    return TaskResult(
        task=name,
        attempts=len(episodes),
        correct=sum(each.verdict == "correct" for each in episodes) if is_checked else None,
        reward=float(np.mean([each.rewards.sum() for each in episodes])),
        tokens=float(np.mean([each.sampled.sum() for each in episodes])),
        unparsed=sum(each.verdict == "unparsed" for each in episodes),
        truncated=sum(each.is_unfinished for each in episodes),
    )


def _line(found: Evaluation, attempts: int) -> str:
    """Formats the means, with intervals and pass@k."""
    parts = []
    for name, value in found.means.items():
        shown = f"avg@{attempts}" if name == "correct" and attempts > 1 else name
        low, high = found.intervals.get(name, (None, None))
        interval = "" if low is None or high is None else f" ({low:,.4g} to {high:,.4g})"
        parts.append(f"{shown} {value:,.4g}{interval}")
    return ", ".join([*parts, *(f"pass@{k} {value:.4g}" for k, value in found.pass_at.items())])


def _table(results: Sequence[TaskResult]) -> list[str]:
    """Formats the results of tasks as aligned columns."""
    heads = ("task", "correct", "reward", "tokens", "unparsed", "truncated")
    rows = [
        (
            each.task,
            "-" if each.correct is None else f"{each.correct}/{each.attempts}",
            f"{each.reward:.4g}",
            f"{each.tokens:.4g}",
            str(each.unparsed),
            str(each.truncated),
        )
        for each in results
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]


def _rollouts(recipe: Mapping[str, Any], file: Path) -> RolloutData:
    data = recipe.get("data")
    data = Selected(registries.data, former="kind").with_key(data, "data") if isinstance(data, Mapping) else {}
    if (name := data.get("name")) != "rollouts":
        raise ConfigError(f"{file}: data.name is {name!r}; a recipe whose data.name is 'rollouts' was expected.")
    return parse(registries.data[name], data, path="data")
