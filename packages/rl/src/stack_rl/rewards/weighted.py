"""Rewards as configs specify them, and their weighted sum."""

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from stack_core.abi.config import config, parse
from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.local_paths import local_path
from stack_core.abi.plugins import registries
from stack_core.functions import import_function
from stack_core.runtime.spans import record_span
from stack_rl.contracts import Completion, Reward, Score
from stack_rl.rewards.unchecked import Unchecked

__all__ = [
    "ChecksItself",
    "ReadsTokens",
    "RewardKind",
    "WeightedReward",
    "as_floats",
    "as_weighted",
    "check_reward",
    "resolved",
    "total_score",
]


@config
class WeightedReward:
    """A reward and its weight in the sum.

    Attributes:
      reward: an entry of the registry `rewards`, as its name or as a mapping of `name` and settings; "module:function";
        "run:DIRECTORY" of a reward model; in Python also a function or a reward's config.
      weight: factor of the reward in the sum.
    """

    reward: Any
    weight: float = 1.0


def as_weighted(reward: Any) -> Any:
    """Wraps a reward without a weight in a `WeightedReward` of weight 1."""
    is_whole = isinstance(reward, WeightedReward) or (isinstance(reward, Mapping) and "reward" in reward)
    return reward if is_whole else WeightedReward(reward=reward)


@runtime_checkable
class ReadsTokens(Protocol):
    """A reward that reads the completion's token ids, and therefore requires the policy to have its tokenizer."""

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Raises a StackError if the policy's tokenizer differs."""
        ...


@runtime_checkable
class RewardKind(Protocol):
    """A config class in the registry `rewards` that builds a reward; a reward without settings is a plain function."""

    def build(self) -> Reward: ...


@runtime_checkable
class ChecksItself(Protocol):
    """A `RewardKind` that checks its requirements before anything is built."""

    def check(self) -> None:
        """Raises a StackError if a requirement is missing."""
        ...


def check_reward(reward: Any) -> None:
    """Raises like `resolved`, but loads no reward model: only its directory must exist."""
    address = str(reward)
    if isinstance(reward, Mapping):
        if isinstance(kind := _kind(reward), ChecksItself):
            kind.check()
    elif callable(reward) or not address.startswith("run:"):
        resolved(reward)
    elif not local_path(address.removeprefix("run:")).is_dir():
        raise ConfigError(
            f"Reward {address!r} is not a directory. Give the directory of a run whose objective is reward_model."
        )


def resolved(reward: Any) -> tuple[str, Reward]:
    """Returns the name and the function of a reward.

    Raises:
      UnknownName: no plugin registers the reward.
      ConfigError: the reward cannot be imported, is not callable, or has unknown settings.
      StackError: the reward cannot be built with its settings.
    """
    if isinstance(reward, Mapping):
        reward = _kind(reward)
    if isinstance(reward, RewardKind):
        return str(getattr(reward, "name", type(reward).__name__)), reward.build()
    if callable(reward):
        return getattr(reward, "__name__", type(reward).__name__), reward
    module, separator, name = str(reward).partition(":")
    if not separator:
        found = registries.rewards[reward]
        return str(reward), found().build() if isinstance(found, type) else found
    if module == "run":
        from stack_rl.rewards.model import ModelReward  # imports jax

        return str(reward), ModelReward(name)
    return name, import_function(reward, label="Reward")


def _kind(reward: Mapping[str, Any]) -> RewardKind:
    """Parses the config of a reward with settings.

    Raises:
      UnknownName: no plugin registers the reward.
      ConfigError: the name is missing, the reward does not accept settings, or a setting is unknown.
    """
    if not isinstance(reward.get("name"), str):
        raise ConfigError(
            f"A reward is {dict(reward)!r}, without a name. Give one of: {', '.join(registries.rewards)}."
        )
    entry = registries.rewards[reward["name"]]
    if not isinstance(entry, type):
        raise ConfigError(f"The reward {reward['name']!r} takes no settings; write its name alone.")
    return parse(entry, reward)


async def total_score(rewards: Sequence[tuple[str, Reward, float]], completion: Completion) -> Score:
    """Computes the weighted sum of the scores, with each score as a fact and the first verdict found.

    `parsed` is the part of the answer that the same reward checked.

    Raises:
      EnvironmentFailed: a reward raised or returned a non-finite number; the message names the reward.
    """
    total, facts, checked = 0.0, dict[str, float](), Score(value=0.0)
    for name, reward, weight in rewards:
        value, score, measured = await _score(name, reward, completion)
        total += weight * value
        checked = score if checked.verdict is None else checked
        facts |= {name: value, **measured}
    return Score(value=total, verdict=checked.verdict, facts=facts, parsed=checked.parsed)


async def _score(name: str, reward: Reward, completion: Completion) -> tuple[float, Score, Mapping[str, float]]:
    """Scores an answer, and converts numbers of any library to Python floats."""
    started_s = time.monotonic()
    try:
        found = reward(completion)
        value = await found if inspect.isawaitable(found) else found
        score = value if isinstance(value, Score) else Score(value=value)
        # Otherwise sums of NumPy half-precision numbers would stay in half precision, and JSON rejects NumPy numbers.
        number, facts = float(score.value), as_floats(score.facts)
    except (Unchecked, EnvironmentFailed):  # their messages already name the cause
        raise
    except Exception as error:  # Rewards are user code and may raise any exception.
        raise EnvironmentFailed(f"reward {name!r} raised {type(error).__name__}: {error}") from error
    record_span("reward", time.monotonic() - started_s, reward=name, value=number if math.isfinite(number) else None)
    if not math.isfinite(number):
        raise EnvironmentFailed(f"reward {name!r} returned {number} for {completion.text!r}; it must be finite")
    return number, score, facts


def as_floats(measurements: Mapping[str, Any]) -> dict[str, float]:
    """Converts measurements of any number type to Python floats.

    Raises:
      ValueError: a value is not a number; the message names the measurement.
    """
    found = dict[str, float]()
    for name, value in measurements.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the fact {name!r} is {value!r}; a number was expected") from error
    return found
