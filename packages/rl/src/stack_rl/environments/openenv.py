"""`environment.name: openenv`: environments behind an OpenEnv server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Environment, Tasks
from stack_rl.environments.messages import History, Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.optional import optional_module
from stack_rl.environments.tasks import SeededTasks

__all__ = ["OpenEnvConfig"]


@config
class OpenEnvConfig:
    """Episodes of a running OpenEnv server, each in a session of its own and with a different seed.

    The policy sees each observation as text and answers with an action. An action that the server's schema refuses
    ends the episode with `invalid_reward` and the verdict "unparsed". All episodes of a batch have a session at the
    same time, so the server needs a `max_concurrent_envs` of at least `data.groups * data.group_size`.

    Attributes:
      url: address of the server, such as "http://127.0.0.1:8000".
      name: selects this environment.
      action: field of the action that receives the answer; None expects an action as a JSON object.
      observation: field of the observation to show; None shows the observation as JSON,
        without its metadata.
      reset: arguments of the environment's `reset`, in addition to the seed.
      instruction: text shown before the first observation.
      max_tokens: maximum number of tokens per action.
      max_turns: maximum number of actions per episode.
      invalid_reward: reward of an answer that is not an action.
      held_out: number of seeds reserved for evaluation.
      timeout_s: time limit of the server's answers in seconds.
      history: "exact" fails if the chat template rewrites earlier turns; "as_seen" keeps them as the policy saw them.
    """

    url: str
    name: Literal["openenv"] = "openenv"
    action: str | None = None
    observation: str | None = None
    reset: Mapping[str, Any] = field(default_factory=dict)
    instruction: str = ""
    max_tokens: PositiveInt = 128
    max_turns: PositiveInt = 16
    invalid_reward: float = 0.0
    held_out: NonNegativeInt = 64
    timeout_s: PositiveFloat = 60.0
    history: History = "exact"

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"most_turns": "environment.max_turns"})

    def check(self, model: Any) -> None:
        """Plays a first observation, to find a server or a field that does not exist."""
        client = self._client().sync()
        try:
            with client:
                found = client.reset(**self.reset, seed=0).observation
        except Exception as error:  # errors of sockets, websockets or the client
            raise ConfigError(
                f"The OpenEnv server at data.environment.url: {self.url!r} does not answer: {type(error).__name__}: "
                f"{error}. Start it, or correct the address."
            ) from error
        if self.observation is not None and self.observation not in found:
            raise ConfigError(
                f"data.environment.observation is {self.observation!r}, but observations of {self.url!r} have the "
                f"fields {', '.join(_fields(found))}."
            )

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        renderer, limits = renderer_of(policy), {"max_tokens": self.max_tokens, "max_turns": self.max_turns}

        def start(episode_seed: int) -> Environment:
            session = _Session(self._client(), self, episode_seed)
            return MessageEnvironment(session, renderer, **limits, history=self.history)

        return SeededTasks(seed, self.held_out, start=start, label=self.url, renderer=renderer)

    def _client(self) -> Any:
        """Creates a client, which connects on its first request.

        Raises:
          ConfigError: openenv is not installed, or the address is invalid.
        """
        core = optional_module("openenv.core.generic_client", environment=self.name, extra="openenv")
        try:
            return core.GenericEnvClient(self.url, connect_timeout_s=self.timeout_s, message_timeout_s=self.timeout_s)
        except ValueError as error:
            raise ConfigError(f"data.environment.url is {self.url!r}: {error}.") from error


@dataclass
class _Session:
    client: Any
    settings: OpenEnvConfig
    seed: int

    async def begin(self) -> Sequence[Message]:
        try:
            result = await self.client.reset(**self.settings.reset, seed=self.seed)
        except RuntimeError as error:
            raise EnvironmentFailed(_explained(error)) from error
        begin = f"{self.settings.instruction}\n" if self.settings.instruction else ""
        return [{"role": "user", "content": begin + self._text(result.observation)}]

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        action = self._action(text) if is_finished else None
        invalid = Reply(reward=self.settings.invalid_reward, verdict="unparsed")
        if action is None:
            return invalid
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" in str(error):  # the client passes the code on in its message only
                return invalid
            raise EnvironmentFailed(_explained(error)) from error
        more = [] if result.done else [{"role": "user", "content": self._text(result.observation)}]
        return Reply(messages=more, reward=float(result.reward or 0.0))

    async def close(self) -> None:
        await self.client.close()

    def _action(self, text: str) -> dict[str, Any] | None:
        if self.settings.action is not None:
            return {self.settings.action: text}
        try:
            found = json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _text(self, observation: Mapping[str, Any]) -> str:
        name = self.settings.observation
        shown = _fields(observation) if name is None else observation[name]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _fields(observation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an observation without its metadata, which may hold the solution."""
    return {name: value for name, value in observation.items() if name != "metadata"}


def _explained(error: RuntimeError) -> str:
    """Formats a server's error, with the remedy if all sessions are in use."""
    if "(code: CAPACITY_REACHED)" not in str(error):
        return f"the OpenEnv server reports: {error}"
    return f"{error}. Raise max_concurrent_envs of the server to data.groups * data.group_size, or lower these"
