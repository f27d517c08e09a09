"""Whatever comes over a connection, and however it ends: no fault, no hang, nothing left in the engine."""

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine

from ..llm.constrained import byte_checkpoint
from .conftest import Served
from .fake_engine import FakeEngine

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/nothing")
PATHS += ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")
WORDS = ("input", "system", "documents", "previous_response_id", "tools", "dimensions", "bad_words", "thinking")
WORDS += ("prompt", "messages", "max_tokens", "n", "stop", "stream", "echo", "logprobs", "tokens", "temperature")
VALUES = (
    "hello",
    "",
    [1, 2],
    [[1], [2]],
    ["a", "b"],
    -1,
    0,
    1,
    3,
    1e9,
    True,
    None,
    {},
    [],
    [""],
    {"a": [1]},
    "\x00\ud83d",
)
USUAL = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 20, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 20},
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": ["a", "b"]},
    "/v1/rerank": {"query": "hello", "documents": ["a", "b"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}


def body_of(source: random.Random, path: str) -> bytes:
    fields: dict[str, Any] = dict(USUAL.get(path, {}))
    fields |= {source.choice(WORDS): source.choice(VALUES) for _ in range(source.choice((0, 0, 0, 1, 1, 3)))}
    fields["stream"] = fields.get("stream", source.random() < 0.5)
    content = json.dumps(fields).encode()
    if source.random() < 0.1:  # no JSON, or other JSON
        place = source.randrange(len(content))
        content = content[:place] + source.randbytes(source.randrange(4)) + content[place + source.randrange(4) :]
    return content


def request_of(source: random.Random) -> bytes:
    path = source.choice(PATHS)
    content = body_of(source, path)
    method = "POST" if source.random() < 0.9 else source.choice(("GET", "PUT", "OPTIONS"))
    kind = "application/json" if source.random() < 0.95 else "text/plain"
    size = len(content) + 5 * (source.random() < 0.05)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n"
    if source.random() < 0.5:
        head += "connection: close\r\n"
    sent = head.encode() + b"\r\n" + content
    if source.random() < 0.1:
        place = source.randrange(len(sent))
        sent = sent[:place] + source.randbytes(3) + sent[place + 3 :]
    return sent


def status_after(server: Served, source: random.Random) -> int | None:
    """Sends a request in some way and leaves in some way; the status that came, if any was waited for."""
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        sent = request_of(source)
        if source.random() < 0.15:
            sent = sent[: source.randrange(len(sent))]
        place = source.randrange(len(sent) + 1)
        connection.sendall(sent[:place])
        connection.sendall(sent[place:])
        how = source.choice(("leave", "reset", "read some", "end sending", "end sending"))
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "read some":
            connection.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                connection.recv(source.choice((1, 100)))
        if how == "end sending":
            with contextlib.suppress(OSError):  # the server refused it and closed
                connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(65536):  # its own limit of time tells of a hang
                received += part
            answer = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            return int(answer[9:12]) if answer else None
    return None


def the_engine_itself() -> LLMEngine:
    """A model behind the interface, with pages for one of the longest requests.

    Programs are those of `test_constraints`, so JAX's cache has them.
    """
    return LLMEngine(CHECKPOINT, EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, pages=64))


CHECKPOINT = byte_checkpoint()


@pytest.mark.parametrize("make_engine", [lambda: FakeEngine(step_s=0.001, most=10_000), the_engine_itself])
@pytest.mark.parametrize("connections", [pytest.param(2000, marks=pytest.mark.slow), 60])
def test_random_requests_and_broken_connections(
    serve: Callable[..., Served], make_engine: Callable[[], Any], connections: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    server = serve(engine, model=CHECKPOINT if isinstance(engine, LLMEngine) else None)
    source = random.Random(connections)
    statuses = [status_after(server, source) for _ in range(connections)]
    answered = {status for status in statuses if status is not None}
    assert {200, 400} <= answered and max(answered) < 500

    def is_idle() -> bool:
        stats = engine.stats()
        return stats.running == stats.waiting == stats.used_pages == 0

    server.wait_until(is_idle)
    assert server.client.get("/health").status_code == 200 and caplog.text == ""
    server.complete(max_tokens=2)
