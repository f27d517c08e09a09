"""Errors of requests, in the format of OpenAI's API.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import math
from collections.abc import Mapping

import orjson

from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError

__all__ = ["INTERNAL", "ApiError", "as_api_error", "bad_request", "error_object", "renamed_error"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
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
    """An error that is sent to the client as the response.

    Attributes:
      status: HTTP status code.
      param: name of the invalid field of the body, or None if no single field is invalid.
      code: machine-readable error code. The argument None selects the default code of the status.
      headers: additional response headers.
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
        """Returns the response body as JSON."""
        return orjson.dumps(error_object(self))


INTERNAL = ApiError(500, "The server failed at this request; its log has the reason. Others are not affected.")
"""Response to an unexpected exception in the server."""


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns an error of status 400, for a request that the client can correct."""
    return ApiError(400, message, param=param, code=code)


def renamed_error(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns an error of a chat request with the field names of another interface.

    Args:
      names: field names of the interface by those of the chat request.
    """
    field = (error.param or "").partition(".")[0]
    if field not in names:
        return error
    name, message = names[field], str(error)
    message = name + message.removeprefix(field) if message.startswith(field) else message
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


def error_object(error: ApiError) -> dict[str, dict[str, str | None]]:
    """Returns the JSON object that OpenAI's clients parse."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def as_api_error(error: GenerationError | EngineBusy | EngineStopped, names: Mapping[str, str]) -> ApiError:
    """Converts an exception of the engine to an error for the client.

    Args:
      names: names of the body's fields by the engine's parameters, if the two differ.
    """
    if isinstance(error, EngineBusy):
        wait_s = max(1, math.ceil(error.retry_after_s))
        return ApiError(429, str(error), headers={"Retry-After": str(wait_s)})
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="engine_stopped")
    param = names.get(error.parameter, error.parameter) if error.parameter else None
    message = str(error) if param is None or param in str(error) else f"{param}: {error}"
    return bad_request(message, param=param, code=error.code)
