"""What goes wrong with a request, in the shape in which OpenAI's API tells it.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import math
from collections.abc import Mapping

import orjson

from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError

__all__ = ["INTERNAL", "ApiError", "as_api_error", "bad_request", "error_object"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "unavailable",
    504: "deadline_exceeded",
}


class ApiError(Exception):
    """An answer that is not the one that was asked for.

    Attributes:
      status: of HTTP.
      param: the field of the body that is at fault, if one is.
      code: for programs; None is the status's own.
      headers: of the answer, besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """JSON."""
        return orjson.dumps(error_object(self))


INTERNAL = ApiError(500, "The server failed at this request; its log has the reason. Others are not affected.")
"""A fault of the server's own."""


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can be mended."""
    return ApiError(400, message, param=param, code=code)


def error_object(error: ApiError) -> dict[str, dict[str, str | None]]:
    """The error as OpenAI's clients parse it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def as_api_error(error: GenerationError | EngineBusy | EngineStopped, names: Mapping[str, str]) -> ApiError:
    """What an engine raised, for a client.

    Args:
      names: the body's names of the engine's parameters, where they differ.
    """
    if isinstance(error, EngineBusy):
        wait_s = max(1, math.ceil(error.retry_after_s))
        return ApiError(429, str(error), headers={"Retry-After": str(wait_s)})
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="engine_stopped")
    param = names.get(error.parameter, error.parameter) if error.parameter else None
    message = str(error) if param is None or param in str(error) else f"{param}: {error}"
    return bad_request(message, param=param)
