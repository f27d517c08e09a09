"""A model repository served over the Open Inference Protocol."""

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import ASGIApp

from stack_core.abi.errors import ConfigError
from stack_core.runtime.http import NO_KEY
from stack_serve.http.access import AccessLog
from stack_serve.http.config import ServerConfig
from stack_serve.http.guards import guards
from stack_serve.inference.service import Service
from stack_serve.oip.http import App

if TYPE_CHECKING:
    from stack_serve.oip.grpc import GrpcServer

__all__ = ["InferenceApp"]

_OPEN = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics"})


class InferenceApp:
    """ASGI application that accepts requests once the initial models of the repository are loaded.

    Attributes:
      grpc_port: port of the gRPC server, once it listens.

    Raises:
      ConfigError: gRPC is requested but not installed.
    """

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.grpc_port: int | None = None
        self._config = config
        self._grpc = _grpc(service, config)
        self.asgi: ASGIApp = _guarded(App(service, config), config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Loads the models of the repository."""
        self._loop = loop
        # `start` has a thread of its own, so it may wait while the loop runs.
        asyncio.run_coroutine_threadsafe(self.service.start(), loop).result()
        if self._grpc is not None:
            self.grpc_port = asyncio.run_coroutine_threadsafe(self._grpc.start(), loop).result()

    def serve(self) -> None:
        """Watches the repository from now on."""
        self._watching = asyncio.get_running_loop().create_task(self.service.watch())

    def drain(self) -> None:
        """Takes no more requests."""
        self.service.drain()
        if self._grpc is not None:
            self._stopping = asyncio.get_running_loop().create_task(self._grpc.stop(self._config.drain_s))
        if self._watching is not None:
            self._watching.cancel()

    def cut_short(self) -> None:
        """Ends requests that still wait, with status 503."""
        self.service.cut_short()

    def close(self) -> None:
        """Lets the lanes compute what waits, unless requests were cut short."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        if self._stopping is not None:
            await self._stopping
        await self.service.close()


def _grpc(service: Service, config: ServerConfig) -> "GrpcServer | None":
    if service.config.grpc_port is None:
        return None
    try:
        from stack_serve.oip.grpc import GrpcServer
    except ModuleNotFoundError as error:
        raise ConfigError(f"gRPC needs {error.name}: pip install 'stack-serve[grpc]'.") from error
    return GrpcServer(service, config, service.config.grpc_port)


def _guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    headers = {"www-authenticate": "Bearer"}
    refusal = Response(f'{{"error": "{NO_KEY}"}}', 401, headers, media_type="application/json")
    for each in reversed(guards(config, open_paths=_OPEN, refusal=refusal)):
        app = each.cls(app, *each.args, **each.kwargs)
    # Outermost, to log rejected requests too.
    return AccessLog(app)
