"""The chat application of `stack serve` for programs on this machine, on the event loop of the process that uses it."""

import asyncio
import socket
from dataclasses import replace

import uvicorn

from stack_core.abi.engines import Engine
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.text.chat_server import ChatServer, Middleware
from stack_serve.http.server import listen, uvicorn_server
from stack_serve.openai.app import make_app
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.service import Service

__all__ = ["LocalServer"]

_TICK_S = 0.01


class LocalServer(ChatServer):
    """A `ChatServer` with all routes of `stack serve`, in front of an engine of the caller."""

    def __init__(
        self, checkpoint: GenerativeCheckpoint, engine: Engine, *, max_tokens: int, middleware: Middleware
    ) -> None:
        self._config = OpenAIConfig(port=0, drain_s=0.0)
        self._engine, self._service = engine, Service(checkpoint, self._config, max_tokens)
        self._app = middleware(make_app(self._service))
        self._uvicorn: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> str:
        listener = listen(replace(self._config, port=port))
        self._service.serve(self._engine)
        self._uvicorn = uvicorn_server(self._app, self._config)
        self._serving = asyncio.create_task(self._serve(self._uvicorn, listener))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(_TICK_S)
        host, port = listener.getsockname()
        return f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._uvicorn is None or self._serving is None:
            return
        self._service.state = "draining"
        self._service.cut_short()
        self._uvicorn.should_exit = True
        # Does not raise if the event loop's owner has cancelled the task.
        await asyncio.wait([self._serving])

    async def _serve(self, server: uvicorn.Server, listener: socket.socket) -> None:
        try:
            await server.serve([listener])
        finally:  # uvicorn does not close them if it is cancelled
            for each in getattr(server, "servers", ()):
                each.close()
            listener.close()
