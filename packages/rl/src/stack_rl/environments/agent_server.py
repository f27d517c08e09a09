"""The chat server in front of the policy, whose clients are the agents of episodes."""

import asyncio
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from stack_core.abi.data import Tokenizer
from stack_core.abi.engines import Engine
from stack_core.abi.errors import GenerationError, StackError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import Constraint, EngineStats, GenerationRequest, GenerationUpdate
from stack_core.abi.plugins import registries
from stack_core.runtime.http import send_response, sent_keys
from stack_core.text.chat_server import ASGIApp, ChatServer
from stack_rl.environments.messages import Renderer
from stack_rl.requests import EpisodeRequests, Receive
from stack_rl.sampling import PolicySampling

__all__ = ["MODEL", "AgentServer", "AgentSession", "check_server"]

MODEL: Final = "policy"
"""Name of the policy for clients."""

_SERVER: Final = "openai"
_BAD_REQUEST, _UNAUTHORIZED = 400, 401
_FULL = b'"context_length_exceeded"'
_NO_SESSION = (
    b'{"error": {"message": "No running episode has this key.", "type": "authentication_error", '
    b'"code": "invalid_api_key", "param": null}}'
)


def check_server() -> None:
    """Raises an UnknownName with the package to install if the registry lacks a chat server."""
    if _SERVER not in registries.chat_servers:
        raise registries.chat_servers.unknown(_SERVER)


@dataclass
class AgentSession:
    """The conversations of one episode, identified by the API key of their client.

    Attributes:
      requests: the episode's requests.
      renderer: renders the policy's tokens as text.
      max_tokens: maximum number of tokens per answer.
      max_answers: maximum number of answers; further requests are refused.
      key: API key of the client.
      is_over, is_full: a request was refused because of the number of answers, or for lack of room.
    """

    requests: EpisodeRequests
    renderer: Renderer
    max_tokens: int
    max_answers: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    is_over: bool = False
    is_full: bool = False
    _sent: int = 0
    # The text of each prompt with its answer, and its tokens.
    _known: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def encode(self, text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> Sequence[int]:
        """Encodes a prompt, of which the longest part that ends with an answer keeps the tokens of that answer."""
        known = max((each for each in tuple(self._known) if text.startswith(each)), key=len, default=None)
        if known is None:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [*self._known[known], *tokenizer.encode(text[len(known) :], add_special_tokens=False)]

    def submit(self, request: GenerationRequest, receive: Receive) -> None:
        """Sends a request to the policy.

        Raises:
          GenerationError: the request cannot be served, or the episode has had all its answers.
        """
        if self._sent + request.sampling.n > self.max_answers:
            self.is_over = True
            message = f"An episode has at most environment.max_turns: {self.max_answers} answers."
            raise GenerationError(message, code="turns_exceeded")
        self.requests.submit(request, receive, max_tokens=self.max_tokens, on_answer=self._note)
        self._sent += request.sampling.n

    def _note(self, prompt: Sequence[int], answer: GenerationUpdate) -> None:
        tokens = (*prompt, *answer.tokens)
        self._known[self.renderer.written(tokens)] = tokens
        if answer.finish_reason == "stop" and answer.stop_reason is None:
            # Templates may end a message with another token than the policy's.
            self._known.setdefault(self.renderer.written(tokens[:-1]), tokens[:-1])


_CURRENT: ContextVar[AgentSession] = ContextVar("stack_rl_agent_session")
"""Session of the request that is being answered."""


class AgentServer:
    """Serves the episodes of one event loop while there are any.

    Args:
      policy: the policy.
      seq_tokens: maximum number of tokens per episode.
      sampling: settings for requests that leave them out.

    Raises:
      UnknownName: no installed package has a chat server.
    """

    def __init__(self, policy: GenerativeCheckpoint, *, seq_tokens: int, sampling: PolicySampling) -> None:
        self._sessions: dict[str, AgentSession] = {}
        served: Any = _ServedPolicy(policy, sampling)
        make_server: type[ChatServer] = registries.chat_servers[_SERVER]
        self._server = make_server(served, _SessionEngine(), max_tokens=seq_tokens, middleware=self._identified)
        self._base_url: str | None = None
        # Starting and closing await, so without a lock two episodes could start the server twice.
        self._changing = asyncio.Lock()

    async def open(self, session: AgentSession) -> str:
        """Starts accepting requests with the session's key, and returns the base URL for clients."""
        async with self._changing:
            self._sessions[session.key] = session
            if self._base_url is None:
                self._base_url = await self._server.start()
            return self._base_url

    async def close(self, session: AgentSession) -> None:
        """Refuses further requests of the session."""
        async with self._changing:
            self._sessions.pop(session.key, None)
            if not self._sessions and self._base_url is not None:
                self._base_url = None
                await self._server.close()

    def _identified(self, app: ASGIApp) -> ASGIApp:
        """Wraps the server's application, which then answers requests in the context of their session."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            keys = [key.decode("latin-1") for key in sent_keys(dict(scope["headers"]))]
            session = next((self._sessions[key] for key in keys if key in self._sessions), None)
            if session is None:
                await send_response(send, _UNAUTHORIZED, _NO_SESSION)
                return
            _CURRENT.set(session)
            await app(scope, receive, _noting(session, send))

        return answer


def _noting(session: AgentSession, send: Any) -> Any:
    """Returns `send` of a request, which also sets `is_full` if the request is refused for lack of room."""
    status = 0

    async def note(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        session.is_full |= status == _BAD_REQUEST and _FULL in message.get("body", b"")
        await send(message)

    return note


class _SessionTokenizer:
    """The policy's tokenizer, which encodes prompts as the current session does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vars(self).update(_public(tokenizer, without="encode"))
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        session = _CURRENT.get(None)
        if session is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return session.encode(text, self._tokenizer, add_special_tokens=add_special_tokens)


class _ServedPolicy:
    """The policy with the run's sampling settings as defaults and a tokenizer for sessions."""

    def __init__(self, policy: GenerativeCheckpoint, sampling: PolicySampling) -> None:
        vars(self).update(_public(policy))
        self.name, self.sampling_defaults = MODEL, dict(vars(sampling))
        self.tokenizer: Any = None if policy.tokenizer is None else _SessionTokenizer(policy.tokenizer)


def _public(source: Any, without: str = "") -> dict[str, Any]:
    """Returns an object's public attributes. Protocol checks ignore attributes from `__getattr__`."""
    return {name: getattr(source, name) for name in dir(source) if not name.startswith("_") and name != without}


class _SessionEngine(Engine):
    """Engine without weights, which passes requests to the current session."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}

    def submit(self, request: GenerationRequest, receive: Receive | None = None) -> None:
        assert receive is not None
        session, left = _CURRENT.get(), request.sampling.n

        def note(update: GenerationUpdate) -> None:
            nonlocal left
            left -= update.finish_reason is not None
            if not left:
                self._sessions.pop(request.request_id, None)
            receive(update)

        session.submit(request, note)
        self._sessions[request.request_id] = session

    def abort(self, request_id: str) -> None:
        if request_id in self._sessions:
            self._sessions.pop(request_id).requests.abort(request_id)

    def compile_constraint(self, constraint: Constraint) -> None:
        _CURRENT.get().requests.engine.compile_constraint(constraint)

    def stats(self) -> EngineStats:
        return _CURRENT.get().requests.engine.stats()

    def start(self) -> None: ...

    def close(self, *, drain_s: float = 0.0) -> None: ...

    def stream(self, request_id: str) -> Any:
        raise StackError("Requests of agents have receivers. Pass one to submit.")

    def update_weights(self, params: Any, **_: Any) -> None:
        raise StackError("The trainer updates the weights of the policy; its agents cannot.")
