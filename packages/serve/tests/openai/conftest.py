import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from stack_core.abi.engines import Engine
from stack_serve.http.server import HttpServer, listen
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.lifecycle import OpenAIApp
from stack_serve.openai.service import Service

from .fake_engine import FakeEngine, checkpoint


@dataclass
class Served:
    """A server on a port of its own, in a thread, and a client of it."""

    engine: Any
    service: Service
    client: httpx2.Client
    http: HttpServer
    address: tuple[str, int]

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", **{"prompt": "hello", "max_tokens": 4, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: str = "hello", **body: Any) -> Any:
        answer = self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, without the last."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error that a body is answered with."""
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        (error,) = answer.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s, "waited too long"
            time.sleep(0.002)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=120)


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., Served]]:
    """Starts servers, and ends them: `start(engine, model=..., and options of OpenAIConfig)`."""
    stops: list[Callable[[], None]] = []

    def start(engine: Engine | None = None, *, model: Any = None, **options: Any) -> Served:
        engine = engine or FakeEngine()
        config = OpenAIConfig(**{"port": 0, "drain_s": 1.0, **options})
        service = Service(model or checkpoint(), config)
        listener = listen(config)
        ready = threading.Event()
        address = listener.getsockname()[:2]
        http = HttpServer(OpenAIApp(service, lambda: engine), listener, config, announce=lambda _: ready.set())
        thread = threading.Thread(target=http.run)
        thread.start()
        assert ready.wait(120)
        client = httpx2.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=120)

        def end() -> None:
            client.close()
            http.drain()
            if isinstance(engine, FakeEngine):
                engine.running.set()
            thread.join(120)
            assert not thread.is_alive()

        stops.append(end)
        return Served(engine, service, client, http, address)

    try:
        yield start
    finally:
        for stop in stops:
            stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers of a test's own."""
    with starting() as start:
        yield start


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with starting() as start:
        yield start()


@pytest.fixture
def server(shared_server: Served) -> Served:
    """A server with the usual settings, which tests share."""
    shared_server.engine.submitted.clear()
    return shared_server
