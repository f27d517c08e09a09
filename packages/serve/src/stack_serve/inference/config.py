"""Configuration of an inference server."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_serve.http.config import MAX_SECONDS, Seconds

__all__ = ["InferenceConfig"]


@config
class InferenceConfig:
    """Versions to serve, queue and request limits, and the gRPC port.

    Attributes:
      live_versions: number of newest versions to serve per model; 0 serves all. A newer version replaces the oldest.
      poll_s: seconds between scans of the repository. 0 disables scanning; clients then load and unload models.
      max_waiting: maximum number of rows queued per version. A request that exceeds it is rejected unless the queue
        is empty.
      grpc_port: port of the additional gRPC server; 0 picks a free port. None serves HTTP only.
      max_json_bytes: maximum size of a request's JSON. Parsing blocks all other requests (60 ms for 16 MiB), so larger
        tensors must be sent as binary.
      timeout_s: timeout in seconds of requests that set none themselves. None sets no limit.
    """

    live_versions: NonNegativeInt = 1
    poll_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 1.0
    max_waiting: PositiveInt = 4096
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    max_json_bytes: PositiveInt = 2**24
    timeout_s: Seconds | None = None
