"""What the server is made with."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.config import config

__all__ = ["ServerConfig"]


@config
class ServerConfig:
    """Where the server listens, whom it lets in, and how much it takes.

    Attributes:
      port: 0 takes one that is free.
      api_keys: clients send one of them as a bearer token; none lets everybody in.
      model_names: what clients call the model; the first is what they are told. None is the checkpoint's own name.
      chat_template: file of a Jinja template that is used instead of the model's own.
      timeout_s: after so long a request ends with status 504; None never.
      receive_timeout_s: the head of a request, and then its body, must have arrived after so long.
      stall_timeout_s: a client that takes nothing for so long is given up.
      drain_s: after SIGTERM, running requests may take so long to end.
      max_body_bytes: of a request.
      max_choices: prompts of a request times the continuations of each.
      cors_origins: of pages whose scripts may use the server, "*" for all.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    model_names: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    chat_template: Path | None = None
    timeout_s: PositiveFloat | None = None
    receive_timeout_s: PositiveFloat = 60.0
    stall_timeout_s: PositiveFloat = 120.0
    drain_s: NonNegativeFloat = 30.0
    max_body_bytes: PositiveInt = 8 * 2**20
    max_choices: PositiveInt = 1024
    cors_origins: tuple[str, ...] = ()
