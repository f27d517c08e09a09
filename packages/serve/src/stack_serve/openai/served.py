"""One model behind OpenAI's interface, as an HTTP server serves it."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp

from stack_core.abi.engines import Engine
from stack_serve.openai.app import make_app
from stack_serve.openai.service import Service

__all__ = ["OpenAIApp"]


class OpenAIApp:
    """Takes jobs when the engine is warm.

    Args:
      make_engine: called on a thread of its own.
    """

    def __init__(self, service: Service, make_engine: Callable[[], Engine]) -> None:
        self.service = service
        self.make_engine = make_engine
        self.asgi: ASGIApp = make_app(service)
        self._engine: Engine | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the engine and compiles its programs."""
        engine = self.make_engine()
        engine.warm_up()
        engine.start()
        self._engine = engine

    def serve(self) -> None:
        """Takes jobs from now on."""
        assert self._engine is not None
        self.service.serve(self._engine)

    def drain(self) -> None:
        """Takes no more jobs."""
        self.service.state = "draining"

    def cut_short(self) -> None:
        """Ends what is running."""
        self.service.cut_short()

    def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.close()
