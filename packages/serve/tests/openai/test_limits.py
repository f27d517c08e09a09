import contextlib
import itertools
import socket
from collections.abc import Callable

import pytest

from stack_core.abi.errors import ConfigError, GenerationError
from stack_serve.http.server import listen
from stack_serve.openai.config import OpenAIConfig

from .conftest import Served
from .fake_engine import FakeEngine, checkpoint

PATH = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 2}


def status(server: Served, path: str = "/v1/models", **headers: str) -> int:
    return server.client.get(path, headers=headers).status_code


def test_keys(serve: Callable[..., Served]) -> None:
    server = serve(api_keys=("first", "zweiter-ü"))
    assert status(server) == 401
    for wrong in ("Bearer wrong", "Bearer", "Bearer first2", "Basic first", "first", "Bearer first second"):
        assert status(server, authorization=wrong) == 401
    assert status(server, authorization="Bearer first") == 200
    assert status(server, authorization="bearer first") == 200
    answer = server.client.get("/v1/models", headers={"authorization": "Bearer zweiter-ü".encode()})
    assert answer.status_code == 200
    answer = server.client.post(PATH, json=BODY)
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    assert answer.headers["www-authenticate"] == "Bearer" and "Authorization: Bearer KEY" in error["message"]
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert status(server, path) == 200
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1//models", "/nothing"):
        assert status(server, path) == 401, "whoever has no key does not learn what there is"


def test_cors(serve: Callable[..., Served]) -> None:
    server = serve(api_keys=("key",), cors_origins=("https://page.example",))
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = server.client.options(PATH, headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = server.client.get("/v1/models", headers={"origin": "https://page.example"})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = server.client.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_without_origins_no_page_may_use_the_server(server: Served) -> None:
    answer = server.client.get("/v1/models", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_large_body(serve: Callable[..., Served]) -> None:
    server = serve(max_body_bytes=1000)
    error = server.refused(PATH, status=413, prompt="x" * 1000)
    assert error["code"] == "request_too_large" and "1000 bytes" in error["message"]
    chunks = (b"x" * 100 for _ in range(50))
    answer = server.client.post(PATH, content=chunks, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    server.complete()


def test_a_full_queue(serve: Callable[..., Served]) -> None:
    engine = FakeEngine(most=2)
    server = serve(engine)
    engine.running.clear()  # so that neither of the first two ends before the third comes
    answer = server.post(PATH, prompt=["a", "b", "c"])
    engine.running.set()
    assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    server.wait_until(lambda: engine.stats().running == 0)
    server.complete(prompt=["a", "b"])


def test_a_deadline(serve: Callable[..., Served]) -> None:
    engine = FakeEngine(step_s=0.01)
    server = serve(engine, timeout_s=0.1)
    error = server.refused(PATH, status=504, prompt="x", max_tokens=200)
    assert error["code"] == "deadline_exceeded" and "0.1 s" in error["message"]
    answer = server.post(PATH, prompt="x", max_tokens=200, stream=True)
    assert answer.status_code == 200 and '"deadline_exceeded"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    engine.running.clear()
    assert server.post(PATH, prompt="x", stream=True).status_code == 504, "before the first token, it has a status"


def test_a_body_that_does_not_come(serve: Callable[..., Served]) -> None:
    server = serve(receive_timeout_s=0.1)
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: 20\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("start", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\na: b"])
def test_a_head_that_does_not_come(serve: Callable[..., Served], start: bytes) -> None:
    server = serve(receive_timeout_s=0.1)
    with server.connect() as connection:
        connection.sendall(start)
        assert connection.recv(1000) == b""
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(1000) == b"", "nor that of a second request"


def test_a_head_without_end(server: Served) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            for number in range(10_000):
                connection.sendall(b"name-%d: %b\r\n" % (number, b"x" * 200))
        with contextlib.suppress(ConnectionError):
            received = connection.recv(1000)
        assert received.startswith(b"HTTP/1.1 400") or received == b""
        assert number < 9_999
    assert status(server, "/health") == 200


def test_a_long_head_that_comes_at_once(server: Served) -> None:
    requests = len(server.engine.submitted)
    with server.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nname: %b\r\n"
        connection.sendall(head % (b"x" * 100_000) + b'content-length: 15\r\n\r\n{"prompt": "x"}')
        received = connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 400") and b"65536 bytes" in received
    assert len(server.engine.submitted) == requests


def test_a_body_may_be_longer_than_a_head(server: Served) -> None:
    with server.connect() as connection:
        body = b'{"prompt": "%b"}' % (b"x" * 100_000)
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_an_engine_that_stopped_is_503(serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    server.engine.stopped = True
    assert server.refused(PATH, status=503, prompt="x")["code"] == "engine_stopped"
    for path in ("/health", "/ready"):
        answer = server.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
    assert 'http_requests_total{handler="/v1/completions"' in server.client.get("/metrics").text
    assert caplog.text == "", "whoever asks how it is makes no news"


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = OpenAIConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"Cannot listen on 127\.0\.0\.1, port \d+: .* Choose another --port"):
            listen(config)


def test_a_template_that_cannot_be_read(serve: Callable[..., Served], tmp_path: object) -> None:
    with pytest.raises(GenerationError, match=r"chat template cannot be read.*Name another file\."):
        serve(chat_template=f"{tmp_path}/nothing.jinja")
    with pytest.raises(GenerationError, match="--chat-template FILE"):
        serve(model=checkpoint(chat_template="{% if %}"))


def test_a_client_that_takes_nothing_is_given_up(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(lambda request, index: itertools.repeat(264), max_tokens=10**6)
    server = serve(engine, stall_timeout_s=0.2, model=checkpoint(max_positions=10**6))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        body = b'{"prompt": "x", "max_tokens": 900000, "stream": true, "n": 32}'
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
        server.wait_until(lambda: engine.stats().running > 0)
        server.wait_until(lambda: engine.stats().running == 0)
    assert caplog.text == "", "it is the client's fault, and no news"
