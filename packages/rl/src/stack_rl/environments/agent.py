"""`environment.name: agent`: episodes played by a user's program through an OpenAI client."""

import asyncio
import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import EnvironmentFailed
from stack_core.abi.formats import GenerativeCheckpoint
from stack_rl.contracts import Action, Environment, Observation, Score, StepResult, Tasks
from stack_rl.environments.endpoint import MODEL, ChatEndpoint, ChatRequest, ChatSession
from stack_rl.environments.functions import imported
from stack_rl.environments.messages import History, Message, MessageEnvironment, Renderer, Reply, renderer_of
from stack_rl.environments.records import Record, read_records
from stack_rl.environments.tasks import ListedTasks

__all__ = ["AgentAccess", "AgentConfig", "AgentLimits", "agent_tasks"]


@dataclass(frozen=True)
class AgentAccess:
    """Connection of an agent to the policy, for `openai.OpenAI(base_url=..., api_key=...)`.

    Attributes:
      base_url: URL of the endpoint.
      api_key: key of the episode.
      model: name of the policy in requests.
    """

    base_url: str
    api_key: str
    model: str = MODEL


@config
class AgentConfig:
    """A user's agent that queries the policy through OpenAI's chat completions and returns the episode's reward.

    The agent is a function of an `AgentAccess` and a record of `source`, and returns a number or a `Score`. A function
    that is not async runs on its own thread. Every request is answered with the policy's current weights; the sampled
    token ids and their log-probabilities are recorded. The requests of an episode form one conversation: each starts
    with the messages and the answer of the previous one. The run sets the sampling options; requests with a
    temperature, tools or streaming are refused.

    If the agent raises, the episode has failed; it does not get a reward of 0. The exception is an agent that raises
    because the conversation ran out of room (status 400, as OpenAI's): the episode is then truncated, with reward 0.

    Attributes:
      agent: "module:function", or in Python the function itself.
      source: glob of JSONL files with training records, as for `prompts`; each record has a `prompt`.
      name: selects this environment.
      held_out: glob of JSONL files with evaluation records; None disables evaluation.
      max_tokens: maximum number of tokens per answer; requests may set a lower limit.
      most_turns: maximum number of answers per episode; further requests are refused.
      history: handling of chat templates that rewrite earlier turns; see `MessageEnvironment`.
    """

    agent: Any
    source: str
    name: Literal["agent"] = "agent"
    held_out: str | None = None
    max_tokens: PositiveInt = 128
    most_turns: PositiveInt = 16
    history: History = "exact"

    def check(self, model: Any) -> None:
        self._function()
        self._records()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        limits = AgentLimits(self.max_tokens, self.most_turns, self.history)
        return agent_tasks(self._function(), *self._records(), limits=limits, policy=policy, seq_tokens=seq_tokens)

    def _function(self) -> Callable[..., Any]:
        return self.agent if callable(self.agent) else imported(self.agent, label="Agent")

    def _records(self) -> tuple[list[Record], list[Record]]:
        held_out = [] if self.held_out is None else read_records(self.held_out, "data.environment.held_out")
        return read_records(self.source, "data.environment.source"), held_out


@dataclass(frozen=True)
class AgentLimits:
    """Limits of an agent's episode; see `AgentConfig`."""

    max_tokens: int
    most_turns: int
    history: History = "exact"


def agent_tasks(
    agent: Callable[..., Any],
    training: Sequence[Record],
    evaluation: Sequence[Record],
    *,
    limits: AgentLimits,
    policy: GenerativeCheckpoint,
    seq_tokens: int,
) -> Tasks:
    """Returns the tasks of an agent, a function of an `AgentAccess` and a record; see `AgentConfig`.

    Raises:
      DataError: the policy cannot exchange messages.
    """
    renderer = renderer_of(policy)
    endpoints: weakref.WeakKeyDictionary[Any, ChatEndpoint] = weakref.WeakKeyDictionary()

    def endpoint() -> ChatEndpoint:
        """Returns the endpoint of the running event loop, which its episodes share."""
        return endpoints.setdefault(asyncio.get_running_loop(), ChatEndpoint())

    def start(record: Record) -> Environment:
        return _Episode(limits, agent, record[1], renderer, seq_tokens, endpoint)

    return ListedTasks(training, evaluation, start=start, label=lambda record: record[0], renderer=renderer)


@dataclass(frozen=True)
class _Returned:
    value: Any


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Episode:
    """An `Environment` and also the `Conversation` inside it, in which the agent plays the environment's side."""

    def __init__(
        self,
        settings: AgentLimits,
        agent: Callable[..., Any],
        record: Mapping[str, Any],
        renderer: Renderer,
        seq_tokens: int,
        endpoint: Callable[[], ChatEndpoint],
    ) -> None:
        self._settings, self._agent, self._record, self._seq_tokens = settings, agent, record, seq_tokens
        self._find_endpoint, self._session = endpoint, ChatSession()
        self._endpoint: ChatEndpoint | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked: ChatRequest | None = None
        self._tokens = self._turns = 0
        # The conversation enforces the turn limit itself so that the agent gets an error; the inner limit is never met.
        budgets = {"max_tokens": settings.max_tokens, "most_turns": settings.most_turns + 1}
        self._inner = MessageEnvironment(self, renderer, **budgets, history=settings.history)

    async def reset(self) -> Observation:
        return self._within_limits(await self._inner.reset())

    async def step(self, action: Action) -> StepResult:
        self._tokens += len(action.tokens)
        outcome = await self._inner.step(action)
        shown = outcome.observation
        if shown is None:
            return outcome
        if self._tokens + len(shown.tokens) < self._seq_tokens:
            return replace(outcome, observation=self._within_limits(shown))
        reply = await self._refuse_remaining(
            # OpenAI's words, by which clients recognize the error.
            f"This model's maximum context length is {self._seq_tokens} tokens, with an answer. However, your messages "
            f"resulted in {self._tokens + len(shown.tokens)} tokens.",
            "context_length_exceeded",
        )
        # Returns the observation that does not fit, because the player then marks the episode as truncated.
        return replace(outcome, reward=reply.reward, verdict=reply.verdict, facts={**outcome.facts, **reply.facts})

    async def begin(self) -> Sequence[Message]:
        self._endpoint = self._find_endpoint()
        access = AgentAccess(await self._endpoint.open(self._session), self._session.key)
        self._start(access)
        event = await self._session.events.get()
        if isinstance(event, ChatRequest):
            self._asked = event
            return event.messages
        if isinstance(event, _Raised):
            raise _failed(event.error)
        raise EnvironmentFailed(f"the agent returned {event.value!r} before its first request to the policy")

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        before = self._asked
        assert before is not None
        prompt_tokens = self._tokens - len(tokens)
        self._session.answer(text, is_finished=is_finished, prompt_tokens=prompt_tokens, tokens=len(tokens))
        self._turns += 1
        event = await self._session.events.get()
        if isinstance(event, _Raised):
            raise _failed(event.error)
        if isinstance(event, _Returned):
            return _scored(event.value)
        if self._turns >= self._settings.most_turns:
            message = f"The episode has had environment.most_turns: {self._settings.most_turns} answers."
            return await self._refuse_remaining(message, "turns_exceeded")
        self._asked = event
        said = [*before.messages, {"role": "assistant", "content": text}]
        if event.messages[: len(said)] != said or len(event.messages) == len(said):
            raise EnvironmentFailed(_other_history(said, event.messages))
        return Reply(messages=event.messages[len(said) :])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._endpoint is not None:
            await self._endpoint.close(self._session)

    def _within_limits(self, observation: Observation) -> Observation:
        """Applies the request's token limit to an observation."""
        self._tokens += len(observation.tokens)
        asked = None if self._asked is None else self._asked.max_tokens
        return replace(observation, max_tokens=min(observation.max_tokens, asked or observation.max_tokens))

    async def _refuse_remaining(self, message: str, code: str) -> Reply:
        """Refuses all requests until the agent ends; an exception it then raises counts as reward 0."""
        event = None
        while event is None or isinstance(event, ChatRequest):
            self._session.refuse(message, code)
            event = await self._session.events.get()
        return Reply() if isinstance(event, _Raised) else _scored(event.value)

    def _start(self, access: AgentAccess) -> None:
        """Starts the agent; its result arrives as an event of the session."""
        if inspect.iscoroutinefunction(self._agent):
            self._task = asyncio.ensure_future(self._run_async(access))
            return
        loop, events = asyncio.get_running_loop(), self._session.events

        def run() -> None:
            try:
                ended: _Returned | _Raised = _Returned(self._agent(access, self._record))
            except BaseException as error:  # An agent is user code, and may even call sys.exit.
                ended = _Raised(error)
            with contextlib.suppress(RuntimeError):  # the run is over and its event loop is closed
                loop.call_soon_threadsafe(events.put_nowait, ended)

        # A daemon, because a thread cannot be cancelled, and a hanging agent must not keep the process alive.
        threading.Thread(target=run, name="agent", daemon=True).start()

    async def _run_async(self, access: AgentAccess) -> None:
        try:
            ended: _Returned | _Raised = _Returned(await self._agent(access, self._record))
        except Exception as error:  # An agent is user code and may raise any exception.
            ended = _Raised(error)
        self._session.events.put_nowait(ended)


def _failed(error: BaseException) -> EnvironmentFailed:
    failure = EnvironmentFailed(f"the agent raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _scored(value: Any) -> Reply:
    """Converts the agent's return value to the last reply.

    Raises:
      EnvironmentFailed: the value is not a number or a `Score`.
    """
    if isinstance(value, Score):
        return Reply(reward=value.value, verdict=value.verdict, facts=value.facts, parsed=value.parsed)
    try:
        return Reply(reward=float(value))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"the agent returned {value!r}; a number or a Score was expected") from error


def _other_history(previous: Sequence[Message], current: Sequence[Message]) -> str:
    """Formats the error for a request that does not continue the conversation."""
    place = next(
        (at for at, pair in enumerate(zip(previous, current, strict=False)) if pair[0] != pair[1]), len(current)
    )
    was = previous[place] if place < len(previous) else "the policy's answer, and something new behind it"
    now = current[place] if place < len(current) else "nothing"
    return (
        f"the agent's request does not continue the previous one: message {place} was {was!r}, and is {now!r}. "
        "An episode is one conversation, in which the policy's answers must not change"
    )
