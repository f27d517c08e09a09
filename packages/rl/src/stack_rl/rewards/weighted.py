"""Rewards as a config names them, and their weighted sum."""

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from stack_core.abi.config import config, parse
from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.local_paths import local_path
from stack_core.abi.plugins import registries
from stack_rl.contracts import Completion, Reward, Score, Verdict
from stack_rl.rewards.unchecked import Unchecked

__all__ = [
    "ChecksItself",
    "ReadsTokens",
    "RewardKind",
    "WeightedReward",
    "check_reward",
    "plain_facts",
    "resolved",
    "total_score",
]


@config
class WeightedReward:
    """A reward and its share in the sum.

    Attributes:
      reward: an entry of the registry `rewards`, by itself or as `name` with settings; "module:function";
        "run:DIRECTORY" of a reward model; or in Python the function itself, or an entry's config.
    """

    reward: Any
    weight: float = 1.0


@runtime_checkable
class ReadsTokens(Protocol):
    """A reward that reads a completion's tokens, which have to be of its own tokenizer."""

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Raises a StackError where the policy's tokenizer is another."""
        ...


@runtime_checkable
class RewardKind(Protocol):
    """A config class of the registry `rewards`, of which a reward is built; a reward without settings is a function."""

    def build(self) -> Reward: ...


@runtime_checkable
class ChecksItself(Protocol):
    """A `RewardKind` that looks at what it needs before anything is built."""

    def check(self) -> None:
        """Raises a StackError where something is missing."""
        ...


def check_reward(reward: Any) -> None:
    """Raises as `resolved` does, but reads no reward model: of one, only the directory has to be there."""
    address = str(reward)
    if isinstance(reward, Mapping):
        if isinstance(kind := _kind(reward), ChecksItself):
            kind.check()
    elif callable(reward) or not address.startswith("run:"):
        resolved(reward)
    elif not local_path(address.removeprefix("run:")).is_dir():
        raise ConfigError(f"Reward {address!r} is no directory. Give that of a run whose objective is reward_model.")


def resolved(reward: Any) -> tuple[str, Reward]:
    """The name and the function of a reward.

    Raises:
      UnknownName: no plugin registers it.
      ConfigError: it cannot be imported, is no function, or has other settings.
      StackError: it cannot be built with its settings.
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
        from stack_rl.rewards.model import ModelReward  # reads the model

        return str(reward), ModelReward(name)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Reward {reward!r} cannot be imported: {error}. Correct it, or PYTHONPATH.") from error
    if not callable(found):
        raise ConfigError(f"Reward {reward!r} is a {type(found).__name__}; a function was expected.")
    return name, found


def _kind(reward: Mapping[str, Any]) -> RewardKind:
    """The config of a reward with settings.

    Raises:
      UnknownName: no plugin registers it.
      ConfigError: it has no name, takes no settings, or has others.
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
    """The weighted sum of the scores, with each as a fact and the first verdict that one gives.

    Raises:
      EnvironmentFailed: a reward raised, or gave no finite number; names it.
    """
    total, facts, verdict = 0.0, dict[str, float](), None
    for name, reward, weight in rewards:
        value, found, measured = await _score(name, reward, completion)
        total, verdict = total + weight * value, verdict or found
        facts |= {name: value, **measured}
    return Score(value=total, verdict=verdict, facts=facts)


async def _score(
    name: str, reward: Reward, completion: Completion
) -> tuple[float, Verdict | None, Mapping[str, float]]:
    """Scores an answer, and converts numbers of the reward's library to Python's."""
    try:
        found = reward(completion)
        value = await found if inspect.isawaitable(found) else found
        score = value if isinstance(value, Score) else Score(value=value)
        # Sums of NumPy's half-precision numbers would stay such, and JSON writes none of its numbers.
        number, facts = float(score.value), plain_facts(score.facts)
    except (Unchecked, EnvironmentFailed):  # which say what is the matter
        raise
    except Exception as error:  # Rewards are a user's code and may raise whatever they like.
        raise EnvironmentFailed(f"reward {name!r} raised {type(error).__name__}: {error}") from error
    if not math.isfinite(number):
        raise EnvironmentFailed(f"reward {name!r} gave {number} for {completion.text!r}; it must be finite")
    return number, score.verdict, facts


def plain_facts(facts: Mapping[str, Any]) -> dict[str, float]:
    """Converts measurements of any library's number types to Python's.

    Raises:
      ValueError: one is not a number; names it.
    """
    found = dict[str, float]()
    for name, value in facts.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the fact {name!r} is {value!r}; a number was expected") from error
    return found
