"""What any server is made with."""

from typing import Annotated

from pydantic import Field, PositiveInt

from stack_core.abi.config import config

__all__ = ["MAX_SECONDS", "Seconds", "ServerConfig"]

MAX_SECONDS = 1e9
"""30 years; event loops take no infinite delay."""

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


@config
class ServerConfig:
    """Where the server listens, whom it lets in, and how much it takes.

    Attributes:
      port: 0 takes one that is free.
      api_keys: clients send one of them as a bearer token; none lets everybody in.
      receive_timeout_s: the head of a request, and then its body, must have arrived after so long.
      stall_timeout_s: the connection of a client that takes nothing of its answer for so long is cut.
      drain_s: seconds that running requests have to end after SIGTERM; the others get status 503.
      max_body_bytes: of a request.
      cors_origins: of pages whose scripts may use the server, "*" for all.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    receive_timeout_s: Seconds = 60.0
    stall_timeout_s: Seconds = 120.0
    drain_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 30.0
    max_body_bytes: PositiveInt = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
