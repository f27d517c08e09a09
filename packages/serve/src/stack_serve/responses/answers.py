"""Answers in the format of the Responses API."""

from collections.abc import Iterator, Sequence
from typing import Any

from stack_core.abi.generation import GenerationUpdate
from stack_serve.http.slices import json_pieces
from stack_serve.openai.blocks import Block, BlockWriter, event
from stack_serve.openai.errors import ApiError
from stack_serve.openai.request import ApiRequest
from stack_serve.responses.bodies import ResponsesBody
from stack_serve.responses.store import ResponseStore, StoredResponse

__all__ = ["ResponseSerializer"]

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_DELTAS = {
    "content": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponseSerializer(BlockWriter):
    """Serializer of a response whose items are messages, reasoning and function calls.

    Args:
      request: the chat request.
      body: the request as it came, parts of which the response repeats.
      messages: messages of the conversation before this response, without instructions.
      store: keeps the complete response if the body asks for it.
    """

    def __init__(
        self, request: ApiRequest, body: ResponsesBody, messages: Sequence[dict[str, Any]], store: ResponseStore
    ) -> None:
        super().__init__(request)
        self._body, self._before, self._store = body, messages, store
        self._events = 0
        self._reasoning_tokens = self._uncertain_tokens = 0

    def read(self, number: int, update: GenerationUpdate) -> bool:
        changed = super().read(number, update)
        # Tokens without text yet count as reasoning if the next text is reasoning.
        self._uncertain_tokens += len(update.tokens)
        if any(delta.kind == "reasoning" for delta in self.deltas):
            self._reasoning_tokens += self._uncertain_tokens
        if self.deltas:
            self._uncertain_tokens = 0
        return changed

    def start_events(self) -> Iterator[bytes]:
        response = self._response([], "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def block_start(self, block: Block) -> Iterator[bytes]:
        yield self._event(
            "response.output_item.added", output_index=block.place, item=self._item(block, "in_progress", empty=True)
        )
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=_part(block, ""))

    def block_delta(self, block: Block, text: str) -> bytes:
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        return self._event(_DELTAS[block.kind], **self._place(block), delta=text, **extra)

    def block_stop(self, block: Block) -> Iterator[bytes]:
        place, text = self._place(block), block.text
        if block.kind == "call":
            yield self._event("response.function_call_arguments.done", **place, name=block.name, arguments=text)
        elif block.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **place, text=text)
        else:
            yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        if block.kind != "call":
            yield self._event("response.content_part.done", **place, part=_part(block, text))
        item = self._item(block, self._status_of(block))
        yield self._event("response.output_item.done", output_index=block.place, item=item)

    def last_chunk(self) -> bytes:
        response = self._complete()
        return self._event(f"response.{response['status']}", response=response)

    def full_response(self) -> Iterator[bytes]:
        return json_pieces(self._complete())

    def error_event(self, error: ApiError) -> bytes:
        output = [self._item(block, "incomplete") for block in self.blocks]
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._response(output, "failed"), "error": failure})

    def _complete(self) -> dict[str, Any]:
        """Returns the complete response, after it was stored."""
        is_cut = self.finish_reason(0) == "length"
        output = [self._item(block, self._status_of(block)) for block in self.blocks]
        response = self._response(output, "incomplete" if is_cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        if self._body.store:
            self._store.put(self.request.id, StoredResponse(response, (*self._before, *self._message())))
        return response

    def _message(self) -> list[dict[str, Any]]:
        """Returns the chat message of this response in a list, which is empty without text and calls."""
        calls = [
            {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text or "{}"}}
            for block in self.blocks
            if block.kind == "call"
        ]
        content, reasoning = (
            "".join(block.text for block in self.blocks if block.kind == kind) for kind in ("content", "reasoning")
        )
        if not content and not calls:
            return []
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        return [message | ({"tool_calls": calls} if calls else {})]

    def _status_of(self, block: Block) -> str:
        is_last = block.place == len(self.blocks) - 1
        return "incomplete" if is_last and self.finish_reason(0) == "length" else "completed"

    def _item(self, block: Block, status: str, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            return {**item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
        content: list[dict[str, Any]] = [] if empty else [_part(block, text)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.request.id.partition('_')[2]}_{block.place}"

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.place}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return event(kind, sequence_number=number, **members)

    def _response(self, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
        body, sampling = self._body, self.request.sampling
        text_format = None if body.text is None or body.text.format is None else body.text.format
        shown = {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_none=True)
        reasoning = {} if body.reasoning is None else body.reasoning.model_dump()
        return {
            "id": self.request.id,
            "object": "response",
            "created_at": self.request.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.request.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": body.store,
            "temperature": sampling.temperature,
            "text": {"format": shown},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_p": sampling.top_p,
            "truncation": body.truncation,
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
