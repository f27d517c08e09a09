"""Chat servers in front of generation engines."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from stack_core.abi.engines import Engine
from stack_core.abi.formats import GenerativeCheckpoint

__all__ = ["ASGIApp", "ChatServer", "Middleware"]

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]
Middleware = Callable[[ASGIApp], ASGIApp]


class ChatServer(ABC):
    """A server of a chat API on 127.0.0.1; each instance is used on one event loop.

    Args:
      checkpoint: model, of which everything but the weights is read.
      engine: engine that generates, started already. Its methods and the tokenizer's see the context variables that
        `middleware` sets for a request.
      max_tokens: maximum length of a prompt with its continuation.
      middleware: wraps the application that answers requests.
    """

    @abstractmethod
    def __init__(
        self, checkpoint: GenerativeCheckpoint, engine: Engine, *, max_tokens: int, middleware: Middleware
    ) -> None: ...

    @abstractmethod
    async def start(self, port: int = 0) -> str:
        """Starts answering requests and returns the base URL for clients; callable again after `close`.

        Args:
          port: TCP port to listen on; 0 picks a free one.

        Raises:
          ConfigError: the port is in use.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends running requests and closes the port."""
