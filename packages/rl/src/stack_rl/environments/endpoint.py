"""A local OpenAI chat-completions endpoint that forwards requests to sessions."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

__all__ = ["MODEL", "ChatEndpoint", "ChatRequest", "ChatSession"]

MODEL: Final = "policy"
"""Name of the only model."""

_HOST, _BACKLOG = "127.0.0.1", 1024
_MOST_BODY_BYTES = 64 << 20
# Request fields that may have any value, and fields that may only have their default.
_FREE: Final = ("model", "messages", "max_tokens", "max_completion_tokens", "user", "metadata")
_FIXED: Final[Mapping[str, Any]] = {"n": 1, "stream": False, "logprobs": False, "tools": [], "stop": []}
_ROLES: Final = ("system", "user", "assistant", "tool")

Response: TypeAlias = tuple[int, Mapping[str, Any]]
"""An HTTP status and the JSON body."""


class _BadRequestError(Exception):
    """A request that gets status 400."""


@dataclass(frozen=True)
class ChatRequest:
    """A client's request.

    Attributes:
      messages: messages with a role and a text.
      max_tokens: maximum number of tokens of the answer; None leaves the limit to the session's owner.
    """

    messages: Sequence[Mapping[str, str]]
    max_tokens: int | None


@dataclass
class ChatSession:
    """The requests of one client, identified by its key and answered one at a time.

    Attributes:
      key: API key of the client.
      events: queue of the client's requests (`ChatRequest`) and of events that the owner adds.
    """

    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    events: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    _waiting: "asyncio.Future[Response] | None" = None

    async def ask(self, request: ChatRequest) -> Response:
        """Queues a request and waits for its answer."""
        if self._waiting is not None:
            return _error("An episode is one conversation: wait for an answer before the next request.", "busy")
        self._waiting = asyncio.get_running_loop().create_future()
        self.events.put_nowait(request)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def answer(self, text: str, *, is_finished: bool, prompt_tokens: int, tokens: int) -> None:
        """Answers the pending request; `is_finished` is False if a token limit ended the text."""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if is_finished else "length",
            "logprobs": None,
        }
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time())}
        self._end((200, {**head, "model": MODEL, "choices": [choice], "usage": usage}))

    def refuse(self, message: str, code: str) -> None:
        """Answers the pending request, if there is one, with an error."""
        self._end(_error(message, code))

    def _end(self, response: Response) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(response)


class ChatEndpoint:
    """Serves sessions on a port of 127.0.0.1 while there are any. An endpoint belongs to one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._server: asyncio.Server | None = None
        # Starting the server awaits, so without a lock two episodes could start one each.
        self._changing = asyncio.Lock()

    async def open(self, session: ChatSession) -> str:
        """Starts accepting requests with the session's key.

        Returns:
          The `base_url` for clients.
        """
        async with self._changing:
            self._sessions[session.key] = session
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, _HOST, 0, backlog=_BACKLOG)
            return f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}/v1"

    async def close(self, session: ChatSession) -> None:
        """Rejects the pending request and all further requests of the session."""
        session.refuse("The episode has ended.", "ended")
        async with self._changing:
            self._sessions.pop(session.key, None)
            if not self._sessions and self._server is not None:
                self._server.close()
                self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one request and closes the connection."""
        try:
            status, body = await self._respond(reader)
            content = json.dumps(body).encode()
            head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client disconnected
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> Response:
        try:
            request, headers, body = await _read(reader)
            session = self._sessions.get(headers.get("authorization", "").removeprefix("Bearer "))
            if session is None:
                return _error("No running episode has this key.", "invalid_api_key", status=401)
            if request == ("GET", "/v1/models"):
                return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": ""}]}
            if request != ("POST", "/v1/chat/completions"):
                return _error(f"There is no {' '.join(request)}, only POST /v1/chat/completions.", "none", status=404)
            return await session.ask(_parse_request(body))
        except _BadRequestError as error:
            return _error(str(error), "unsupported_value")


async def _read(reader: asyncio.StreamReader) -> tuple[tuple[str, str], dict[str, str], bytes]:
    """Reads a request and returns (method, path), headers with lower-case names, and the body."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", "0"))
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise _BadRequestError(f"This is not an HTTP/1.1 request: {error}.") from error
    if "transfer-encoding" in headers or not 0 <= size <= _MOST_BODY_BYTES:
        raise _BadRequestError(
            f"Send the body with a Content-Length of at most {_MOST_BODY_BYTES} bytes; chunks are refused."
        )
    return (method, path), headers, await reader.readexactly(size)


def _parse_request(body: bytes) -> ChatRequest:
    """Parses a request.

    Raises:
      _BadRequestError: it is not a chat completion, or requests an unsupported option.
    """
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise _BadRequestError(f"The body is not JSON: {error}.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise _BadRequestError("'messages' must be a list of at least one message.")
    for name, value in fields.items():
        # `_FIXED` itself stands for a missing entry: no value of a request equals it, so unknown fields are refused.
        if name not in _FREE and value is not None and _FIXED.get(name, _FIXED) != value:
            raise _BadRequestError(
                f"{name!r} is {value!r}. Leave it out: the run sets the sampling options, and an answer is one text."
            )
    if fields.get("model") != MODEL:
        raise _BadRequestError(f"'model' is {fields.get('model')!r}; the only one here is {MODEL!r}.")
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
    # Not `isinstance`, which accepts booleans.
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise _BadRequestError(f"'max_tokens' is {limits[0]!r}; a whole number of at least 1 was expected.")
    return ChatRequest([_message(each) for each in fields["messages"]], min(limits, default=None))


def _message(message: Any) -> Mapping[str, str]:
    fields = {name: value for name, value in message.items() if value} if isinstance(message, dict) else {}
    content = fields.pop("content", "")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    role = fields.pop("role", None)
    if role not in _ROLES or not isinstance(content, str) or fields:
        raise _BadRequestError(
            f"A message is {message!r}; a role of {', '.join(_ROLES)} and a text as its content were expected."
        )
    return {"role": role, "content": content}


def _error(message: str, code: str, *, status: int = 400) -> Response:
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
