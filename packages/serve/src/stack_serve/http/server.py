"""The process that serves: listens, starts the engine beside, drains at a signal."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from stack_core.errors import ConfigError
from stack_core.protocols import Engine
from stack_serve.http.app import make_app
from stack_serve.http.config import ServerConfig
from stack_serve.http.protocol import LimitedProtocol
from stack_serve.http.service import Service

__all__ = ["HttpServer", "listen"]

_AFTER_DRAIN_S = 5
_KEEP_ALIVE_S = 75


def listen(config: ServerConfig) -> socket.socket:
    """The socket to serve on.

    Raises:
      ConfigError: the address is taken, or is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {config.host}, port {config.port}: {error.strerror}. Choose another --port or --host."
        ) from error
    return listener


class HttpServer:
    """Serves one model. It answers from the beginning, and takes jobs when the engine is warm.

    Args:
      make_engine: called on a thread of its own; what it raises ends the server.
      announce: called with the server's address when it takes jobs.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        make_engine: Callable[[], Engine],
        *,
        announce: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._service = service
        self._listener = listener
        self._make_engine = make_engine
        self._announce = announce
        self._uvicorn = _Uvicorn(_uvicorn_config(service))
        self._engine: Engine | None = None
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serves until `drain` is called. On the main thread SIGTERM and SIGINT call it; a second ends the process.

        Raises:
          StackError: the engine cannot start.
        """
        uvicorn_loop = self._uvicorn.config.get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(self._run())
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Takes no more jobs, lets running ones end for the time that the config gives them, and stops."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._start_engine, args=(self._loop,), daemon=True)
        with _signals(self.drain):
            thread.start()
            await self._uvicorn.serve([self._listener])
            if self._engine is not None:
                await asyncio.to_thread(self._engine.close)
        if thread.is_alive():
            os._exit(0)  # The engine compiles still, which nothing interrupts, and nobody needs it any more.

    def _start_engine(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            engine = self._make_engine()
            engine.warm_up()
            engine.start()
        except Exception as error:  # It is raised again, by `run`.
            self._failure = error
            self._uvicorn.should_exit = True
            return
        self._engine = engine
        loop.call_soon_threadsafe(self._serve, engine)

    def _serve(self, engine: Engine) -> None:
        if self._service.state == "starting":
            self._service.serve(engine)
            host, port = self._listener.getsockname()[:2]
            self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def _drain(self) -> None:
        assert self._loop is not None
        self._service.state = "draining"
        self._uvicorn.should_exit = True
        self._loop.call_later(self._service.config.drain_s, self._service.cut_short)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to its owner; uvicorn's own handling ends the process by the signal it drained for."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(service: Service) -> uvicorn.Config:
    class Protocol(LimitedProtocol):
        receive_timeout_s = service.config.receive_timeout_s

    return uvicorn.Config(
        make_app(service),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(service.config.drain_s) + _AFTER_DRAIN_S,
    )


@contextlib.contextmanager
def _signals(drain: Callable[[], None]) -> Iterator[None]:
    """Calls `drain` at the first SIGTERM or SIGINT, and ends the process at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        drain()

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
