"""What an inference server is made with."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_serve.http.config import MAX_SECONDS, Seconds

__all__ = ["InferenceConfig"]


@config
class InferenceConfig:
    """Which versions are served, and how much may wait.

    Attributes:
      live_versions: of each model, counted from its newest; 0 is all. A newer one replaces the oldest.
      poll_s: how often the repository is looked at; 0 never, so that clients load and unload.
      max_waiting: rows that may wait for a version; more are refused.
      grpc_port: to serve over gRPC, too; 0 takes one that is free.
      max_json_bytes: of a request's JSON, whose parsing stops all other requests: 60 ms for 16 MiB. Larger tensors are
        sent as binary.
      timeout_s: of requests that name no time themselves; None waits.
    """

    live_versions: NonNegativeInt = 1
    poll_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 1.0
    max_waiting: PositiveInt = 4096
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    max_json_bytes: PositiveInt = 2**24
    timeout_s: Seconds | None = None
