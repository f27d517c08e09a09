"""Limits of connections in addition to those of `tests/openai`, and around another protocol of uvicorn."""

import contextlib
import json
import socket
import time
from collections.abc import Callable

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from stack_serve.http import server as http_server

from ..openai.conftest import Served
from ..openai.fake_engine import FakeEngine

HEAD = b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def request(version: bytes = b"1.1", **body: object) -> bytes:
    content = json.dumps({"prompt": "hello", "max_tokens": 3, **body}).encode()
    return HEAD % (version, len(content)) + content


@pytest.fixture
def around_h11(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Served]) -> Served:
    monkeypatch.setattr(http_server, "HttpToolsProtocol", H11Protocol)
    return serve(FakeEngine(step_s=0.005))


@pytest.mark.parametrize("part", [b"", b"x"])
def test_the_rest_of_a_body_must_arrive_in_time_although_it_is_answered(
    serve: Callable[..., Served], part: bytes
) -> None:
    """Bytes that trickle in do not extend the time."""
    server = serve(receive_timeout_s=0.2)
    with server.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 404")
        connection.settimeout(0.02)
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began_s + 10:
                connection.sendall(part)
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    break
        assert time.monotonic() < began_s + 5


def test_a_body_that_arrives_in_time_is_no_obstacle_to_further_requests(serve: Callable[..., Served]) -> None:
    server = serve(receive_timeout_s=0.2)
    with server.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 404")
        connection.sendall(b"abc")
        time.sleep(0.4)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")


def test_who_leaves_a_pipeline_frees_all(around_h11: Served) -> None:
    with around_h11.connect() as connection:
        for _ in range(3):
            connection.sendall(request(max_tokens=250, stream=True, ignore_eos=True))
        around_h11.wait_until(lambda: around_h11.engine.stats().running == 1)
    around_h11.wait_until(lambda: around_h11.engine.stats().running == 0)
    assert around_h11.engine.steps < 200 and len(around_h11.engine.submitted) == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_only_ends_sending_gets_the_answer(around_h11: Served, version: bytes) -> None:
    with around_h11.connect() as connection:
        connection.sendall(request(version, stream=True))
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            received = file.read()
    assert received.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]\n\n" in received
    # h11 sends no chunks to such clients, and nothing is left for `UnchunkedWriter` to do.
    assert (b"chunked" in received) == (version == b"1.1")


def test_a_long_head_is_refused(around_h11: Served) -> None:
    with around_h11.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nname: %b\r\n\r\n" % (b"x" * 100_000))
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
