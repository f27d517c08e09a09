"""Errors of requests, with their HTTP status codes and messages."""

import contextlib
import math
from collections.abc import Iterator, Mapping

from stack_core.abi.errors import DeadlineExceeded, EngineBusy, EngineStopped, InferenceError, StackError, UnknownName
from stack_serve.bundle.manifest import Manifest

__all__ = ["ProtocolError", "expecting", "http_headers", "http_status", "message_of"]

_STATUSES = (
    (InferenceError, 400),
    (UnknownName, 404),
    (EngineBusy, 429),
    (EngineStopped, 503),
    (DeadlineExceeded, 504),
)


class ProtocolError(StackError):
    """A request that violates the protocol. `status` is the HTTP status code."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def expecting(manifest: Manifest) -> Iterator[None]:
    """Adds the model's signatures to errors that a request's parsing raises."""
    try:
        yield
    except (InferenceError, ProtocolError) as error:
        raise ProtocolError(f"{error} Expected {manifest.computes}.", status=http_status(error)) from error


def http_status(error: Exception) -> int:
    """Returns the HTTP status of an error, by its class. An unexpected exception has status 500."""
    if isinstance(error, ProtocolError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def http_headers(error: Exception) -> Mapping[str, str]:
    """Returns additional response headers for an error."""
    if isinstance(error, EngineBusy):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, ProtocolError) and error.status == 408:
        return {"connection": "close"}
    return {}


def message_of(error: Exception) -> str:
    """Returns the message for the client, without the details of unexpected exceptions."""
    if isinstance(error, StackError):
        return str(error)
    return "The server failed at this request; its log has the reason. Others are not affected."
