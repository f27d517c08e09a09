"""`environment.name: agent`: episodes played by a user's program through a client of OpenAI's API."""

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import EnvironmentFailed
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.functions import import_function
from stack_rl.contracts import PlaysItself, Score, StepResult, Tasks
from stack_rl.environments.agent_server import MODEL, AgentServer, AgentSession, check_server
from stack_rl.environments.messages import Renderer, renderer_of
from stack_rl.environments.records import Record, read_records
from stack_rl.environments.tasks import ListedTasks
from stack_rl.requests import EpisodeRequests

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
    """A user's agent that queries the policy through OpenAI's API and returns the episode's reward.

    The agent is a function of an `AgentAccess` and a record of `source`, and returns a number or a `Score`. Each
    synchronous agent runs on its own thread; async agents share an event loop, separate from the run's. `stack serve`
    provides the server in front of the policy's engine: tools, streaming, stop texts and sampling options have the same
    effects and errors.

    Every request is answered with the policy's current weights; the sampled token ids and their log-probabilities are
    recorded. The conversations of an episode form a prefix tree: a prompt after a recorded answer keeps its tokens and
    extends its branch, and any other prompt begins a new branch. Branches are separate segments of the episode's row
    and share its `seq_tokens`. The run's sampling settings are the defaults of requests. `EpisodeRequests` lists the
    answers that are trained. Tokens of a stop text are not recorded.

    If the agent raises, the episode fails instead of getting the reward 0. The reward is 0 only if the agent raises
    after a refused request, for lack of room (status 400, as OpenAI's) or because of `max_turns`. Without room, the
    episode is truncated.

    Attributes:
      agent: "module:function", or in Python the function itself.
      source: glob of JSONL files with training records, as for `prompts`; each record has a `prompt`.
      name: selects this environment.
      held_out: glob of JSONL files with evaluation records; None disables evaluation.
      max_tokens: maximum number of tokens per answer; requests may set a lower limit.
      max_turns: maximum number of answers per episode; further requests are refused.
    """

    plays_itself: ClassVar[bool] = True

    agent: Any
    source: str
    name: Literal["agent"] = "agent"
    held_out: str | None = None
    max_tokens: PositiveInt = 128
    max_turns: PositiveInt = 16

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"most_turns": "environment.max_turns"})

    def check(self, model: Any) -> None:
        check_server()
        self._function()
        self._records()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        limits = AgentLimits(self.max_tokens, self.max_turns)
        return agent_tasks(self._function(), *self._records(), limits=limits, policy=policy, seq_tokens=seq_tokens)

    def _function(self) -> Callable[..., Any]:
        return self.agent if callable(self.agent) else import_function(self.agent, label="Agent")

    def _records(self) -> tuple[list[Record], list[Record]]:
        held_out = [] if self.held_out is None else read_records(self.held_out, "data.environment.held_out")
        return read_records(self.source, "data.environment.source"), held_out


@dataclass(frozen=True)
class AgentLimits:
    """Limits of an agent's episode; see `AgentConfig`."""

    max_tokens: int
    max_turns: int


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
      UnknownName: no installed package has a chat server.
    """
    check_server()
    renderer = renderer_of(policy)
    servers: weakref.WeakKeyDictionary[Any, AgentServer] = weakref.WeakKeyDictionary()

    def find_server(requests: EpisodeRequests) -> AgentServer:
        """Returns the server of the running event loop, which its episodes share."""
        loop = asyncio.get_running_loop()
        if loop not in servers:
            servers[loop] = AgentServer(policy, seq_tokens=seq_tokens, sampling=requests.sampling)
        return servers[loop]

    def start(record: Record) -> PlaysItself:
        return _Episode(limits, agent, record[1], renderer, find_server)

    return ListedTasks(training, evaluation, start=start, label=lambda record: record[0], renderer=renderer)


class _Episode:
    """A `PlaysItself`: the agent plays, and its requests reach the policy through a server."""

    def __init__(
        self,
        limits: AgentLimits,
        agent: Callable[..., Any],
        record: Mapping[str, Any],
        renderer: Renderer,
        find_server: Callable[[EpisodeRequests], AgentServer],
    ) -> None:
        self._limits, self._agent, self._record, self._renderer = limits, agent, record, renderer
        self._find_server = find_server
        self._opened: tuple[AgentServer, AgentSession] | None = None

    async def play(self, requests: EpisodeRequests) -> StepResult:
        server = self._find_server(requests)
        session = AgentSession(requests, self._renderer, self._limits.max_tokens, self._limits.max_turns)
        self._opened = server, session
        access = AgentAccess(await server.open(session), session.key)
        value, error = await self._run(access)
        requests.is_truncated |= session.is_full
        if error is not None:
            # An agent need not handle the end of its episode, which the policy has caused.
            if session.is_over or (session.is_full and requests.answers):
                return StepResult()
            raise EnvironmentFailed(f"the agent raised {type(error).__name__}: {error}") from error
        if not requests.answers:
            raise EnvironmentFailed(f"the agent returned {value!r} without an answer of the policy")
        return _scored(value)

    async def close(self) -> None:
        if self._opened is not None:
            server, session = self._opened
            await server.close(session)

    async def _run(self, access: AgentAccess) -> tuple[Any, BaseException | None]:
        """Runs the agent, and returns its value or its exception.

        The run's event loop waits for the engine, so an async agent has another one: timeouts of its client would
        expire meanwhile. An agent that is not async has its own thread.
        """
        if inspect.iscoroutinefunction(self._agent):

            async def play() -> tuple[Any, BaseException | None]:
                try:
                    return await self._agent(access, self._record), None
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # an agent may even call sys.exit, which would end the loop of all
                    return None, error

            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(play(), _agents_loop()))
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def run() -> None:
            try:
                result = self._agent(access, self._record), None
            except BaseException as error:  # an agent may even call sys.exit
                result = None, error
            with contextlib.suppress(RuntimeError):  # the run is over and its event loop is closed
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(result))

        # A daemon, because a thread cannot be cancelled, and a hanging agent must not keep the process alive.
        threading.Thread(target=run, name="agent", daemon=True).start()
        return await ended


@functools.cache
def _agents_loop() -> asyncio.AbstractEventLoop:
    """Starts the event loop of all async agents of this process, on its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


def _scored(value: Any) -> StepResult:
    """Converts the agent's return value to the result of its episode.

    Raises:
      EnvironmentFailed: the value is not a number or a `Score`.
    """
    if isinstance(value, Score):
        return StepResult(reward=value.value, verdict=value.verdict, facts=value.facts, parsed=value.parsed)
    try:
        return StepResult(reward=float(value))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"the agent returned {value!r}; a number or a Score was expected") from error
