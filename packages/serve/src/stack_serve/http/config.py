"""Configuration shared by all HTTP servers."""

from typing import Annotated

from pydantic import Field, PositiveInt

from stack_core.abi.config import config

__all__ = ["MAX_SECONDS", "Seconds", "ServerConfig"]

MAX_SECONDS = 1e9
"""About 30 years. Event loops do not accept an infinite delay."""

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


@config
class ServerConfig:
    """Address, access control, timeouts and size limits of an HTTP server.

    Attributes:
      host: host name or IP address to listen on.
      port: TCP port to listen on. 0 picks a free port.
      api_keys: keys that clients may send as a bearer token. An empty tuple disables authentication.
      receive_timeout_s: time limit in seconds for receiving a request's head, and then for its body.
      stall_timeout_s: seconds without progress in sending a response before the connection is closed.
      drain_s: seconds that running requests have to finish after SIGTERM; the others get status 503.
      max_body_bytes: maximum size of a request body.
      cors_origins: origins of web pages whose scripts may use the server; "*" allows all.
      traces: exports OpenTelemetry spans of POST requests, as the `OTEL_*` environment variables say.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    receive_timeout_s: Seconds = 60.0
    stall_timeout_s: Seconds = 120.0
    drain_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 30.0
    max_body_bytes: PositiveInt = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
    traces: bool = False
