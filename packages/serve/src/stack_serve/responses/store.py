"""Responses kept in memory, which later requests continue."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stack_serve.openai.errors import ApiError

__all__ = ["ResponseStore", "StoredResponse"]

_MAX_BYTES = 2**26


@dataclass(frozen=True)
class StoredResponse:
    """A response with its conversation.

    Attributes:
      response: body of the response.
      messages: chat messages of the conversation, including the response and excluding instructions.
    """

    response: Mapping[str, Any]
    messages: Sequence[dict[str, Any]]


class ResponseStore:
    """The most recently used responses, of at most 64 MiB in total.

    Args:
      max_responses: maximum number of responses; 0 keeps none.
    """

    def __init__(self, max_responses: int, *, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def put(self, name: str, stored: StoredResponse) -> None:
        """Keeps a response and drops the least recently used until the limits hold.

        A response that alone exceeds the limit of bytes is not kept.
        """
        # Conversations share messages in memory, so this is an upper bound.
        size = len(orjson.dumps(stored.response)) + len(orjson.dumps(stored.messages))
        if size > self._max_bytes:
            return
        self._stored[name] = stored, size
        self._bytes += size
        while self._stored and (len(self._stored) > self._max_responses or self._bytes > self._max_bytes):
            _, (_, dropped) = self._stored.popitem(last=False)
            self._bytes -= dropped

    def get(self, name: str, *, param: str | None = None) -> StoredResponse:
        """Returns a response.

        Raises:
          ApiError: 404, the id is unknown, or its response was dropped.
        """
        if name not in self._stored:
            message = (
                f"There is no response {name[:100]!r}. The server keeps the last {self._max_responses} in its memory, "
                "unless store is false. Send the earlier items as input."
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        self._stored.move_to_end(name)
        return self._stored[name][0]

    def delete(self, name: str) -> None:
        """Drops a response; raises an ApiError as `get` does."""
        self.get(name)
        self._bytes -= self._stored.pop(name)[1]
