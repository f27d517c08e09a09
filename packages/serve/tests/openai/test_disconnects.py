import http.client
import json
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Served
from .fake_engine import FakeEngine

PATH = "/v1/completions"


@pytest.fixture
def slow(serve: Callable[..., Served]) -> Served:
    return serve(FakeEngine(step_s=0.005))


def send(connection: socket.socket, **body: object) -> None:
    content = json.dumps({"prompt": "hello", "max_tokens": 250, "ignore_eos": True, **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection.sendall(head % len(content) + content)


def ended_early(server: Served) -> bool:
    """Whether the engine is idle, long before the tokens that were asked for."""
    return server.engine.stats().running == 0 and server.engine.steps < 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_who_leaves_is_not_generated_for(slow: Served, stream: bool, how: str) -> None:
    connection = slow.connect()
    send(connection, stream=stream, n=3, prompt=["a", "b"])
    slow.wait_until(lambda: slow.engine.stats().running == 6)
    if stream:
        assert connection.recv(10)
    steps = slow.engine.steps
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    slow.wait_until(lambda: ended_early(slow))
    assert slow.engine.steps - steps < 50
    assert slow.complete(max_tokens=3)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_who_only_ends_sending_gets_the_answer(slow: Served, stream: bool) -> None:
    slow.engine.running.clear()
    with slow.connect() as connection:
        send(connection, stream=stream, max_tokens=30)
        connection.shutdown(socket.SHUT_WR)
        slow.wait_until(lambda: slow.engine.stats().running == 1)
        slow.engine.running.set()
        answer = http.client.HTTPResponse(connection)
        answer.begin()  # which passes over interim answers
        text = answer.read().decode()
        assert answer.status == 200 and text.count("finish_reason") == (30 if stream else 1)
        assert connection.recv(1) == b"", "nothing follows it"


def test_who_ends_sending_and_leaves_later_is_not_generated_for(slow: Served) -> None:
    slow.engine.running.clear()
    connection = slow.connect()
    send(connection)
    connection.shutdown(socket.SHUT_WR)
    slow.wait_until(lambda: slow.engine.stats().running == 1)
    connection.close()
    slow.wait_until(lambda: slow.engine.stats().running == 0)


def test_who_leaves_while_waiting_leaves_the_queue(slow: Served) -> None:
    slow.engine.running.clear()
    connection = slow.connect()
    send(connection)
    slow.wait_until(lambda: slow.engine.stats().running == 1)
    connection.close()
    slow.wait_until(lambda: slow.engine.stats().running == 0)


def test_who_leaves_within_the_body_starts_nothing(slow: Served) -> None:
    with slow.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: 100\r\n\r\n{")
    slow.complete(max_tokens=1)
    assert len(slow.engine.submitted) == 1


def test_requests_in_a_pipeline_are_answered_in_order(slow: Served) -> None:
    with slow.connect() as connection:
        for word in ("a", "b"):
            send(connection, max_tokens=2, echo=True, prompt=word)
        received = b""
        while received.count(b'"choices"') < 2:
            received += connection.recv(10_000)
    assert received.index(b'"text":"a') < received.index(b'"text":"b')


def test_who_leaves_a_pipeline_frees_all(slow: Served) -> None:
    with slow.connect() as connection:
        for _ in range(3):
            send(connection, stream=True)
        slow.wait_until(lambda: slow.engine.stats().running == 1)
        steps = slow.engine.steps
    slow.wait_until(lambda: ended_early(slow))
    assert slow.engine.steps - steps < 50
    assert len(slow.engine.submitted) == 1


def test_many_at_once_get_their_own(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(most=1000))

    def ask(number: int) -> bool:
        if number % 5 == 0:
            with server.connect() as connection:
                send(connection, stream=True)
                connection.recv(1)
            return True
        stream = number % 2 == 0
        body = {"prompt": f"number {number}", "seed": number, "max_tokens": 20, "n": 2}
        if not stream:
            texts = [choice["text"] for choice in server.complete(**body)["choices"]]
        else:
            events = server.events(PATH, **body)
            parts = [(event["choices"][0]["index"], event["choices"][0]["text"]) for event in events]
            texts = ["".join(text for index, text in parts if index == which) for which in (0, 1)]
        again = [choice["text"] for choice in server.complete(**body)["choices"]]
        return texts == again

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(ask, range(1, 120)))
    server.wait_until(lambda: server.engine.stats().running == 0)
