"""One model served over HTTP with OpenAI's API."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from stack_core.abi.engines import Engine
from stack_serve.openai.app import make_app
from stack_serve.openai.service import Service

__all__ = ["ModelApp", "OpenAIApp"]


class ModelApp:
    """Application that accepts requests once the engine is warm.

    Args:
      service: has the methods `serve` and `cut_short` in addition to those of a `ModelService`.
      make_engine: function that builds the engine; called on a separate thread.
    """

    def __init__(self, asgi: ASGIApp, service: Any, make_engine: Callable[[], Any]) -> None:
        self.service = service
        self.make_engine = make_engine
        self.asgi = asgi
        self._engine: Any = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Builds the engine and compiles the programs that it needs first."""
        engine = self.make_engine()
        engine.prepare()
        engine.start()
        self._engine = engine

    def serve(self) -> None:
        """Starts accepting requests."""
        assert self._engine is not None
        self.service.serve(self._engine)

    def drain(self) -> None:
        """Stops accepting requests."""
        self.service.state = "draining"

    def cut_short(self) -> None:
        """Cancels the running requests."""
        self.service.cut_short()

    def close(self) -> None:
        """Closes the engine if it was started."""
        if self._engine is not None:
            self._engine.close()


class OpenAIApp(ModelApp):
    """Application of a language model."""

    def __init__(self, service: Service, make_engine: Callable[[], Engine]) -> None:
        super().__init__(make_app(service), service, make_engine)
