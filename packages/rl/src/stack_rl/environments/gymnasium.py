"""`environment.name: gymnasium`: Gymnasium environments with text observations and text actions."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Environment, Tasks
from stack_rl.environments.messages import History, Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.optional import optional_module
from stack_rl.environments.tasks import SeededTasks

__all__ = ["GymnasiumConfig"]


@config
class GymnasiumConfig:
    """Episodes of `gymnasium.make(id)`, with a different seed for each task.

    The policy sees each observation as text and answers with an action: for a `Discrete` space the last whole number of
    its answer, for a `Text` space the whole answer. An action outside the space ends the episode with `invalid_reward`
    and the verdict "unparsed".

    Attributes:
      id: id of the environment; "module:Name-v0" imports the module first.
      name: selects this environment.
      options: keyword arguments of `gymnasium.make`.
      instruction: text shown before the first observation.
      max_tokens: maximum number of tokens per action.
      max_turns: maximum number of actions per episode.
      invalid_reward: reward of an answer that is not an action.
      held_out: number of seeds reserved for evaluation.
      history: "exact" fails if the chat template rewrites earlier turns; "as_seen" keeps them as the policy saw them.
    """

    id: str
    name: Literal["gymnasium"] = "gymnasium"
    options: Mapping[str, Any] = field(default_factory=dict)
    instruction: str = ""
    max_tokens: PositiveInt = 16
    max_turns: PositiveInt = 32
    invalid_reward: float = 0.0
    held_out: NonNegativeInt = 64
    history: History = "exact"

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"most_turns": "environment.max_turns"})

    def check(self, model: Any) -> None:
        self._made().close()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        renderer, limits = renderer_of(policy), {"max_tokens": self.max_tokens, "max_turns": self.max_turns}

        def start(episode_seed: int) -> Environment:
            game = _Game(self._made(), self, episode_seed)
            return MessageEnvironment(game, renderer, **limits, history=self.history)

        return SeededTasks(seed, self.held_out, start=start, label=self.id, renderer=renderer)

    def _made(self) -> Any:
        """Creates the Gymnasium environment.

        Raises:
          ConfigError: Gymnasium is not installed, the id is unknown, or the actions are neither numbers nor text.
        """
        gymnasium = optional_module("gymnasium", environment=self.name, extra="gymnasium")
        try:
            made = gymnasium.make(self.id, **self.options)
        except Exception as error:  # Gymnasium and its environments may raise any exception.
            raise ConfigError(f"Gymnasium cannot make {self.id!r}: {type(error).__name__}: {error}") from error
        space = made.action_space
        if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise ConfigError(f"The action space of {self.id!r} is {space}; only Discrete and Text are supported.")
        return made


@dataclass
class _Game:
    made: Any
    settings: GymnasiumConfig
    seed: int

    async def begin(self) -> Sequence[Message]:
        observation, _ = await asyncio.to_thread(self.made.reset, seed=self.seed)
        begin = f"{self.settings.instruction}\n" if self.settings.instruction else ""
        return [{"role": "user", "content": begin + _as_text(observation)}]

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        action = _action(text, self.made.action_space) if is_finished else None
        if action is None:
            return Reply(reward=self.settings.invalid_reward, verdict="unparsed")
        observation, reward, terminated, truncated, _ = await asyncio.to_thread(self.made.step, action)
        more = [] if terminated or truncated else [{"role": "user", "content": _as_text(observation)}]
        return Reply(messages=more, reward=float(reward))

    async def close(self) -> None:
        self.made.close()


def _as_text(observation: Any) -> str:
    """Formats an observation: text unchanged, numbers without their NumPy type, arrays in full on one line."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, np.ndarray):  # str() would leave out the middle of an array with over 1,000 elements
        return " ".join(np.array2string(observation, threshold=observation.size + 1).split())
    if isinstance(observation, np.generic):  # str() of a tuple would contain "np.int64(4)"
        return str(observation.item())
    if isinstance(observation, Mapping):
        return ", ".join(f"{name}: {_as_text(each)}" for name, each in observation.items())
    if isinstance(observation, (tuple, list)):
        return f"({', '.join(map(_as_text, observation))})"
    return " ".join(str(observation).split())


def _action(text: str, space: Any) -> Any:
    """Parses the action of a text; None if the text lacks an action of the space."""
    if hasattr(space, "n"):
        numbers = re.findall(r"-?\d+", text)
        found = int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None  # fits np.int64
        return found if found is not None and space.contains(np.int64(found)) else None
    return text if space.contains(text) else None
