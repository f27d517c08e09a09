"""The server process: listens, starts the application on another thread, and drains on a signal."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, cast, runtime_checkable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stack_core.abi.errors import ConfigError
from stack_serve.http.config import ServerConfig
from stack_serve.http.connection import AnswerTracking, LimitedConnection

__all__ = ["App", "HttpServer", "listen", "uvicorn_server"]

# uvicorn drops requests after its own limit; requests that were cut short need time to answer 503 before.
_AFTER_DRAIN_S = 5
_KEEP_ALIVE_S = 75


def listen(config: ServerConfig) -> socket.socket:
    """Opens the socket to serve on.

    Raises:
      ConfigError: the address is in use, or does not belong to this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    # Otherwise a restart fails until the connections of the last process have timed out.
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


@runtime_checkable
class App(Protocol):
    """An application of the HTTP server.

    Attributes:
      asgi: ASGI application, which answers during startup, too.
    """

    @property
    def asgi(self) -> ASGIApp: ...

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepares for requests, on a separate thread; an exception stops the server."""
        ...

    def serve(self) -> None:
        """Takes requests from now on; called on the event loop after `start`."""
        ...

    def drain(self) -> None:
        """Takes no more requests; called on the event loop."""
        ...

    def cut_short(self) -> None:
        """Cancels requests that still run after the drain time of the config; called on the event loop."""
        ...

    def close(self) -> None:
        """Frees what `start` made, if that ended well; on a thread of its own, after the last answer."""
        ...


class HttpServer:
    """Serves an application. It answers from the beginning, and takes requests once that has started.

    Args:
      announce: called with the server's address when it takes requests.
    """

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        config: ServerConfig,
        *,
        announce: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._app = app
        self._listener = listener
        self._config = config
        self._announce = announce
        self._uvicorn = uvicorn_server(app.asgi, config)
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serves until `drain` is called. On the main thread, SIGTERM and SIGINT call it; a second signal exits.

        Raises:
          StackError: the application cannot start.
        """
        uvicorn_loop = self._uvicorn.config.get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(self._run())
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Takes no more requests, lets running ones end for the time that the config gives them, and stops."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._start, args=(self._loop,), daemon=True)
        with _signals(self.drain):
            thread.start()
            await self._uvicorn.serve([self._listener])
            # On another thread, because `close` may wait for coroutines on this loop.
            await asyncio.to_thread(self._app.close)
        if thread.is_alive():
            os._exit(0)  # It compiles still, which nothing interrupts, and nobody needs it any more.

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._app.start(loop)
        except Exception as error:  # It is raised again, by `run`.
            self._failure = error
            self._uvicorn.should_exit = True
            return
        loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        # A signal may have arrived during the start.
        if not self._uvicorn.should_exit:
            self._app.serve()
            host, port = self._listener.getsockname()[:2]
            self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def _drain(self) -> None:
        assert self._loop is not None
        self._app.drain()
        self._uvicorn.should_exit = True
        self._loop.call_later(self._config.drain_s, self._app.cut_short)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers; uvicorn's handlers re-raise the signal after draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_server(asgi: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """Returns a uvicorn server of an application, with the limits of a config and without signal handlers."""

    def limited(**options: Any) -> LimitedConnection:
        limits = {"receive_timeout_s": config.receive_timeout_s, "stall_timeout_s": config.stall_timeout_s}
        return LimitedConnection(HttpToolsProtocol(**options), **limits)

    settings = uvicorn.Config(
        AnswerTracking(asgi),
        http=cast("Any", limited),  # uvicorn calls it, though it is annotated as a class
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.drain_s) + _AFTER_DRAIN_S,
    )
    return _Uvicorn(settings)


@contextlib.contextmanager
def _signals(drain: Callable[[], None]) -> Iterator[None]:
    """Calls `drain` at the first SIGTERM or SIGINT, and ends the process at the second."""
    # Python accepts signal handlers only on the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            # A normal exit would wait for a compilation, which cannot be interrupted.
            os._exit(128 + number)
        received.append(number)
        drain()

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
