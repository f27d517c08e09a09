"""One language model served over HTTP with OpenAI's API."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp

from stack_core.abi.engines import Engine
from stack_serve.openai.app import make_app
from stack_serve.openai.service import Service

__all__ = ["OpenAIApp"]


class OpenAIApp:
    """Application that accepts jobs once the engine is warm.

    Args:
      make_engine: function that builds the engine; called on a separate thread.
    """

    def __init__(self, service: Service, make_engine: Callable[[], Engine]) -> None:
        self.service = service
        self.make_engine = make_engine
        self.asgi: ASGIApp = make_app(service)
        self._engine: Engine | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Builds the engine and compiles the programs that it needs first."""
        engine = self.make_engine()
        engine.prepare()
        engine.start()
        self._engine = engine

    def serve(self) -> None:
        """Starts accepting jobs."""
        assert self._engine is not None
        self.service.serve(self._engine)

    def drain(self) -> None:
        """Stops accepting jobs."""
        self.service.state = "draining"

    def cut_short(self) -> None:
        """Cancels the running jobs."""
        self.service.cut_short()

    def close(self) -> None:
        """Closes the engine if it was started."""
        if self._engine is not None:
            self._engine.close()
