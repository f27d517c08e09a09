import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stack_serve.http.config import ServerConfig
from stack_serve.http.server import HttpServer, listen
from stack_serve.inference.config import InferenceConfig
from stack_serve.inference.service import Service
from stack_serve.oip.served import InferenceApp


@dataclass
class Served:
    """A server of a repository, in a thread, and a client of it."""

    repository: Path
    service: Service
    client: httpx2.Client
    http: HttpServer
    address: str

    def infer(self, body: Any, *, model: str = "digits", version: str = "", status: int = 200) -> Any:
        path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def index(self) -> dict[tuple[str, str], str]:
        entries = self.client.post("/v2/repository/index").json()
        return {(entry["name"], entry["version"]): entry["state"] for entry in entries}

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline_s, "waited too long"
            time.sleep(0.01)


@contextlib.contextmanager
def starting(digits: Path, repository: Path) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(
            *, keys: tuple[str, ...] = (), max_body_bytes: int = 2**22, stall_timeout_s: float = 120.0, **options: Any
        ) -> Served:
            shutil.copytree(digits, repository / "digits" / "1")
            config = ServerConfig(
                port=0, drain_s=5.0, api_keys=keys, max_body_bytes=max_body_bytes, stall_timeout_s=stall_timeout_s
            )
            service = Service(repository, InferenceConfig(**{"poll_s": 0.05, **options}))
            listener = stack.enter_context(listen(config))
            ready = threading.Event()
            http = HttpServer(InferenceApp(service, config), listener, config, announce=lambda _: ready.set())
            thread = threading.Thread(target=http.run)
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(http.drain)
            assert ready.wait(60)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            client = stack.enter_context(httpx2.Client(base_url=f"http://{address}", timeout=30))
            return Served(repository, service, client, http, address)

        yield start


@pytest.fixture
def serve(digits: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Serves repositories with version 1 of `digits`: `serve(options of InferenceConfig, keys=...)`."""
    with starting(digits, tmp_path / "repository") as start:
        yield start


@pytest.fixture(scope="module")
def shared(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests of a file share; its repository stays as it is."""
    with starting(digits, tmp_path_factory.mktemp("shared")) as start:
        yield start(poll_s=0)


@pytest.fixture(scope="module")
def shared_grpc(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over HTTP and gRPC."""
    with starting(digits, tmp_path_factory.mktemp("shared")) as start:
        yield start(poll_s=0, grpc_port=0)
