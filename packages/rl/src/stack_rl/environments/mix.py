"""`environment.name: mix`: several environments with weights, which may follow the measured difficulty."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BeforeValidator, Field, PositiveFloat

from stack_core.abi.config import Selected, config
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_rl.choosing import Memory, choose_task
from stack_rl.contracts import Environment, PlaysItself, Tasks, Trajectory

__all__ = ["CurriculumConfig", "MixConfig", "MixedTasks", "WeightedEnvironment"]

_LONGEST_BLOCK: Final = 10_000
_ORDER: Final = 3  # third number of the seed of a block's order
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


@config
class WeightedEnvironment:
    """An environment of a mix.

    Attributes:
      environment: environment config, an entry of the registry `environments`.
      weight: share of the groups, relative to the sum of all weights.
    """

    environment: Annotated[Any, Selected(registries.environments)]
    weight: PositiveFloat = 1.0


def _weighted(environment: Any) -> Any:
    """Wraps an environment without a weight in a `WeightedEnvironment` of weight 1."""
    is_weighted = isinstance(environment, WeightedEnvironment) or (
        isinstance(environment, Mapping) and "environment" in environment
    )
    return environment if is_weighted else WeightedEnvironment(environment=environment)


@config
class CurriculumConfig:
    r"""Weights that prefer environments of medium difficulty for the current policy.

        w_i \propto weight_i max(floor, 4 p_i (1 - p_i)),    p_i <- p_i + rate (s - p_i) after each group

    p_i: running success of environment i, 0.5 before its first group. s: successful attempts of a group, as a
    fraction. An attempt is successful if its verdict is "correct" or, without a verdict, if its reward is at least
    `success_reward`. With rewards of 0 and 1, p (1 - p) is the variance of the reward, and groups without variance
    contribute no gradient.

    Attributes:
      rate: step of the running success.
      floor: minimum factor of a weight, which keeps measuring environments that are too easy or too hard.
      success_reward: reward of a successful attempt without a verdict.
    """

    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    success_reward: float = 1.0


@config
class MixConfig:
    """Groups from several environments, in shares of their weights.

    Without a curriculum, the number of groups of each environment differs from its share by less than 1 after every
    block of groups; the order within a block is random. A block has as many groups as the smallest share needs to have
    one. The order is a function of the run's seed and the number of the group. Each environment visits its tasks as if
    it were the only one.

    With a curriculum, the shares follow the running success of each environment after every batch, and tasks of finite
    environments are visited in random order. The success is part of the checkpoint's position in the data.

    Evaluation plays the held-out tasks of all environments.

    Attributes:
      environments: at least two environments, each of which may be wrapped as `environment` with a `weight`. One may be
        a mix without a curriculum.
      name: selects this environment.
      curriculum: weights by measured difficulty; None keeps the weights.
    """

    environments: Annotated[tuple[Annotated[WeightedEnvironment, BeforeValidator(_weighted)], ...], Field(min_length=2)]
    name: Literal["mix"] = "mix"
    curriculum: CurriculumConfig | None = None

    @property
    def sources(self) -> list[str]:
        """Globs of the task files of all environments."""
        found = list[str]()
        for each in self.environments:
            source = getattr(each.environment, "source", None)
            found += getattr(each.environment, "sources", [source] if isinstance(source, str) else [])
        return found

    @property
    def plays_itself(self) -> bool:
        """Whether episodes of an environment play themselves."""
        return any(getattr(each.environment, "plays_itself", False) for each in self.environments)

    @property
    def has_images(self) -> bool:
        """True if an environment has images."""
        return any(getattr(each.environment, "has_images", False) for each in self.environments)

    def check(self, model: Any) -> None:
        if self.curriculum is None:
            _block_groups(_shares([each.weight for each in self.environments]))
        for number, each in enumerate(self.environments):
            if isinstance(each.environment, MixConfig) and each.environment.curriculum is not None:
                raise ConfigError(
                    f"data.environment.environments[{number}] is a mix with a curriculum, which only the outer mix can "
                    "have. Set data.environment.curriculum instead, or list its environments in the outer mix."
                )
            each.environment.check(model)

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        parts = [each.environment.build(policy, seq_tokens=seq_tokens, seed=seed) for each in self.environments]
        for number, (each, tasks) in enumerate(zip(self.environments, parts, strict=True)):
            if tasks.training == 0:
                raise DataError(
                    f"data.environment.environments[{number}], {each.environment.name!r}, has no task to train on."
                )
        weights = [each.weight for each in self.environments]
        if self.curriculum is None:
            return MixedTasks(parts, weights, seed=seed)
        return CurriculumTasks(parts, weights, seed=seed, curriculum=self.curriculum)


@dataclass
class MixedTasks:
    """`Tasks` of several environments; task t is task t // n of environment t % n.

    Attributes:
      parts: tasks of each environment.
      weights: weight of each environment.
      seed: seed of the order.
      training: None; every number is a task.
    """

    parts: Sequence[Tasks]
    weights: Sequence[float]
    seed: int
    training: int | None = field(default=None, init=False)

    @property
    def held_out(self) -> int:
        return sum(each.held_out for each in self.parts)

    def episode(self, task: int, *, held_out: bool = False) -> Environment | PlaysItself:
        part, place = self._place(task, held_out)
        return part.episode(place, held_out=held_out)

    def name(self, task: int, *, held_out: bool = False) -> str:
        part, place = self._place(task, held_out)
        return part.name(place, held_out=held_out)

    def text(self, tokens: tuple[int, ...]) -> str:
        return self.parts[0].text(tokens)

    def choose(self, group: int, memory: Memory) -> int:
        shares = _shares(self.weights)
        block, place = divmod(group, _block_groups(shares))
        part, number = place_in_block(shares, block, place, seed=self.seed)
        return self._task(part, number)

    def learn(self, trajectories: Sequence[Trajectory], memory: Memory) -> Memory:
        return memory

    def _task(self, part: int, number: int) -> int:
        # An inner mix has no memory, because `MixConfig.check` refuses one with a curriculum.
        return choose_task(number, self.parts[part], {}, seed=self.seed) * len(self.parts) + part

    def _place(self, task: int, is_evaluation: bool) -> tuple[Tasks, int]:
        """Returns the environment of a task and the task's local number."""
        if not is_evaluation:
            return self.parts[task % len(self.parts)], task // len(self.parts)
        ends = list(accumulate(each.held_out for each in self.parts))
        part = bisect.bisect_right(ends, task)
        return self.parts[part], task - (ends[part] - self.parts[part].held_out)


@dataclass
class CurriculumTasks(MixedTasks):
    """Mixed tasks whose weights follow the running success; see `CurriculumConfig`."""

    curriculum: CurriculumConfig = field(kw_only=True)

    def choose(self, group: int, memory: Memory) -> int:
        shares = self.shares(memory)
        # A Weyl sequence, whose points are spread more evenly than random numbers: the shares of a batch are nearly
        # exact. Rounding keeps a sum of shares below 1 from missing the last environment.
        offset = np.random.default_rng([self.seed, _ORDER]).random()
        point = (offset + group * _GOLDEN) % 1.0
        part = min(bisect.bisect_right(list(accumulate(shares)), point), len(shares) - 1)
        return self._task(part, group)

    def shares(self, memory: Memory) -> list[float]:
        """Returns the share of each environment."""
        factors = [max(self.curriculum.floor, 4 * p * (1 - p)) for p in self.successes(memory)]
        weights = [weight * factor for weight, factor in zip(self.weights, factors, strict=True)]
        return [each / math.fsum(weights) for each in weights]

    def successes(self, memory: Memory) -> list[float]:
        """Returns the running success of each environment."""
        found: Mapping[str, float] = memory.get("success", {})  # JSON has text keys
        return [found.get(str(part), 0.5) for part in range(len(self.parts))]

    def learn(self, trajectories: Sequence[Trajectory], memory: Memory) -> Memory:
        found = self.successes(memory)
        groups = dict[int, list[Trajectory]]()
        for each in trajectories:
            groups.setdefault(each.group, []).append(each)
        for _, attempts in sorted(groups.items()):
            part = attempts[0].task % len(self.parts)
            success = sum(map(self._is_success, attempts)) / len(attempts)
            found[part] += self.curriculum.rate * (success - found[part])
        return {"success": {str(part): success for part, success in enumerate(found)}}

    def _is_success(self, attempt: Trajectory) -> bool:
        if attempt.verdict is not None:
            return attempt.verdict == "correct"
        return float(attempt.rewards.sum()) >= self.curriculum.success_reward


def place_in_block(shares: Sequence[Fraction], block: int, place: int, *, seed: int) -> tuple[int, int]:
    r"""Returns the environment of a group, and the number of earlier groups of that environment.

    Environment i has c_i(n) of the first n groups at the end of a block, with cumulative shares P_i:

        c_i(n) = round(P_i n) - round(P_{i-1} n)

    so |c_i(n) - p_i n| < 1, and the counts sum to n.

    Args:
      shares: share p_i of each environment; a block is long enough for each to have a group.
      block: number of the block.
      place: place of the group within the block.
      seed: seed of the order within blocks.
    """
    first, size = block * _block_groups(shares), _block_groups(shares)
    before, after = _counts(shares, first), _counts(shares, first + size)
    inside = [end - begin for begin, end in zip(before, after, strict=True)]
    order = np.random.default_rng([seed, block, _ORDER]).permutation(np.repeat(np.arange(len(shares)), inside))
    part = int(order[place])
    return part, before[part] + int(np.count_nonzero(order[:place] == part))


def _counts(shares: Sequence[Fraction], groups: int) -> list[int]:
    ends = [math.floor(end * groups + Fraction(1, 2)) for end in accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _shares(weights: Sequence[float]) -> list[Fraction]:
    # Exact, because rounding errors would grow with the number of groups.
    exact = [Fraction(each) for each in weights]
    return [each / sum(exact) for each in exact]


def _block_groups(shares: Sequence[Fraction]) -> int:
    """Returns the number of groups of a block.

    Raises:
      ConfigError: the block is too long.
    """
    found = math.ceil(1 / min(shares))
    if found > _LONGEST_BLOCK:
        raise ConfigError(
            f"An environment of the mix has a share of {float(min(shares)):.2g}; at least {1 / _LONGEST_BLOCK:g} was "
            "expected. Raise its weight or leave it out."
        )
    return found
