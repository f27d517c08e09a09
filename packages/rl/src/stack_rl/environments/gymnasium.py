"""`environment.name: gymnasium`: an environment of Gymnasium, whose observations the policy reads as text."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.installing import install_command
from stack_rl.contracts import Environment, Tasks
from stack_rl.environments.messages import History, Message, MessageEnvironment, Renderer, Reply, renderer_of

__all__ = ["GymnasiumConfig"]


@config
class GymnasiumConfig:
    """Episodes of `gymnasium.make(id)`, each task a seed of its own.

    The policy is shown an observation as text and answers with an action: the last whole number that it writes, for a
    space `Discrete`, or all of the text, for `Text`. An action that is none of the space ends the episode with
    `invalid_reward` and the verdict "unparsed".

    Attributes:
      id: of the environment; "module:Name-v0" imports the module first.
      options: keyword arguments of it.
      instruction: shown before the first observation.
      max_tokens: of an action.
      most_turns: actions of an episode.
      invalid_reward: of text that is no action.
      held_out: seeds that a run is evaluated on.
      history: what a chat template that changes earlier turns means; see `MessageEnvironment`.
    """

    id: str
    name: Literal["gymnasium"] = "gymnasium"
    options: Mapping[str, Any] = field(default_factory=dict)
    instruction: str = ""
    max_tokens: PositiveInt = 16
    most_turns: PositiveInt = 32
    invalid_reward: float = 0.0
    held_out: NonNegativeInt = 64
    history: History = "exact"

    def check(self, model: Any) -> None:
        self._made().close()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        return _Seeds(self, renderer_of(policy), seed)

    def _made(self) -> Any:
        """The environment.

        Raises:
          ConfigError: Gymnasium is not installed, has none of this name, or its actions are neither numbers nor text.
        """
        try:
            import gymnasium
        except ImportError as error:
            command = install_command("stack-rl[gymnasium]")
            raise ConfigError(f"The environment 'gymnasium' needs Gymnasium: {command}") from error
        try:
            made = gymnasium.make(self.id, **self.options)
        except Exception as error:  # Gymnasium and the environments made by it raise whatever they like.
            raise ConfigError(f"Gymnasium cannot make {self.id!r}: {type(error).__name__}: {error}") from error
        space = made.action_space
        if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise ConfigError(f"Actions of {self.id!r} are {space}; a policy writes those of Discrete and Text alone.")
        return made


class _Seeds:
    training: int | None = None

    def __init__(self, settings: GymnasiumConfig, renderer: Renderer, seed: int) -> None:
        self._settings, self._renderer, self._seed = settings, renderer, seed
        self.held_out = settings.held_out

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        settings = self._settings
        seed = int(np.random.default_rng([self._seed, held_out, task]).integers(1 << 31))
        conversation = _Game(settings._made(), settings, seed)
        budgets = {"max_tokens": settings.max_tokens, "most_turns": settings.most_turns}
        return MessageEnvironment(conversation, self._renderer, **budgets, history=settings.history)

    def name(self, task: int, *, held_out: bool = False) -> str:
        return f"{self._settings.id} {'held out ' if held_out else ''}{task}"

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._renderer.written(tokens)


@dataclass
class _Game:
    made: Any
    settings: GymnasiumConfig
    seed: int

    async def begin(self) -> Sequence[Message]:
        observation, _ = await asyncio.to_thread(self.made.reset, seed=self.seed)
        begin = f"{self.settings.instruction}\n" if self.settings.instruction else ""
        return [{"role": "user", "content": begin + _shown(observation)}]

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        action = _action(text, self.made.action_space) if is_finished else None
        if action is None:
            return Reply(reward=self.settings.invalid_reward, verdict="unparsed")
        observation, reward, terminated, truncated, _ = await asyncio.to_thread(self.made.step, action)
        more = [] if terminated or truncated else [{"role": "user", "content": _shown(observation)}]
        return Reply(messages=more, reward=float(reward))

    async def close(self) -> None:
        self.made.close()


def _shown(observation: Any) -> str:
    return observation if isinstance(observation, str) else " ".join(str(observation).split())


def _action(text: str, space: Any) -> Any:
    """The action that a text says; None if it says none of the space's."""
    if hasattr(space, "n"):
        numbers = re.findall(r"-?\d+", text)
        found = int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
        return found if found is not None and space.contains(np.int64(found)) else None
    return text if space.contains(text) else None
