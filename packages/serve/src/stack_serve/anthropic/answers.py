"""Answers and errors in the format of Anthropic's Messages API."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import orjson

from stack_serve.http.slices import json_pieces
from stack_serve.openai.blocks import Block, BlockWriter, event
from stack_serve.openai.errors import ApiError

__all__ = ["MessagesSerializer", "error_body"]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def error_body(error: ApiError) -> bytes:
    """Returns the JSON of an error."""
    return orjson.dumps({"type": "error", "error": _error(error)})


def _error(error: ApiError) -> dict[str, str]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": kind, "message": str(error)}


class MessagesSerializer(BlockWriter):
    """Serializer of one message with its blocks of text, thinking and tool use."""

    def start_events(self) -> Iterator[bytes]:
        yield event("message_start", message=self._message([], is_complete=False))

    def block_start(self, block: Block) -> Iterator[bytes]:
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        if block.kind == "call":
            empty = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        yield event("content_block_start", index=block.place, content_block=empty)

    def block_delta(self, block: Block, text: str) -> bytes:
        members = {"content": "text", "reasoning": "thinking", "call": "partial_json"}
        kinds = {"content": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}
        delta = {"type": kinds[block.kind], members[block.kind]: text}
        return event("content_block_delta", index=block.place, delta=delta)

    def block_stop(self, block: Block) -> Iterator[bytes]:
        yield event("content_block_stop", index=block.place)

    def last_chunk(self) -> bytes:
        return event("message_delta", delta=self._ending(), usage=self._usage()) + event("message_stop")

    def full_response(self) -> Iterator[bytes]:
        return json_pieces(self._message([_full(block) for block in self.blocks], is_complete=True))

    def error_event(self, error: ApiError) -> bytes:
        return event("error", error=_error(error))

    def _message(self, content: list[dict[str, Any]], *, is_complete: bool) -> dict[str, Any]:
        ending = self._ending() if is_complete else {"stop_reason": None, "stop_sequence": None}
        return {
            "id": self.request.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            **ending,
            "usage": self._usage(),
        }

    def _ending(self) -> dict[str, Any]:
        reason, stop = self.finish_reason(0), self.choices[0].stop_reason
        if reason == "stop":
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        return {
            "stop_reason": _REASONS.get(reason or "", reason),
            "stop_sequence": stop if isinstance(stop, str) else None,
        }

    def _usage(self) -> dict[str, int]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _full(block: Block) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):  # they may be cut off at the token limit
        arguments = json.loads(block.text or "{}")
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
