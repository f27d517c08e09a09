"""Responses of `POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

import orjson

from stack_core.abi.generation import GenerationUpdate
from stack_core.text.message_parsers import MessageDelta
from stack_serve.http.slices import json_pieces
from stack_serve.openai.request import ApiRequest
from stack_serve.openai.serializer import Serializer

__all__ = ["ChatSerializer"]


class ChatSerializer(Serializer):
    """Serializer of chat responses; parses them if the request has a parser.

    Attributes:
      deltas: deltas of the last update.
    """

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ApiRequest) -> None:
        super().__init__(request)
        start = request.start_parsing
        self._messages = [] if start is None else [start() for _ in self.choices]
        self.deltas: list[MessageDelta] = []

    def opening(self, prompt: int, number: int) -> bytes:
        """Returns the first chunk, which has the role and no text."""
        role = orjson.dumps(self.request.role)
        tokens = b',"prompt_token_ids":' + orjson.dumps(self.request.prompts[prompt].tokens)
        return b"".join(
            (
                self.head,
                b',"choices":[{"index":%d,"delta":{"role":%b,"content":""}' % (number, role),
                b',"logprobs":null,"finish_reason":null}]',
                tokens if self.request.wants_token_ids else b"",
                self.continuous_usage(),
                b"}\n\n",
            )
        )

    def read(self, number: int, update: GenerationUpdate) -> bool:
        if self._messages:
            self.deltas = self._messages[number].push(update)
        else:
            self.deltas = [MessageDelta("content", update.text)] if update.text else []
        return bool(self.deltas)

    def call_id(self, call: int) -> str:
        """Returns the id of a tool call of the first continuation."""
        return self._messages[0].calls[call][0]

    def finish_reason(self, number: int) -> str | None:
        reason = self.choices[number].finish_reason
        return "tool_calls" if reason == "stop" and self._messages and self._messages[number].calls else reason

    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """Returns the delta with the text. It is empty in a chunk that only ends the message, as in OpenAI's API."""
        if self._messages:
            text = orjson.dumps(self._messages[number].delta_members(self.deltas))[1:-1]
        else:
            text = b'"content":' + orjson.dumps(update.text) if update.text or update.tokens else b""
        if not (self.request.wants_logprobs and update.logprobs):
            return (b'"delta":{%b},"logprobs":null,' % text,)
        return (b'"delta":{%b},"logprobs":' % text, *json_pieces(self.request.texts.chat(update.logprobs)), b",")

    def choice_members(self, prompt: int, number: int) -> dict[str, Any]:
        choice, request = self.choices[number], self.request
        message = {
            "role": request.role,
            "content": "".join(choice.text),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if self._messages:
            message |= self._messages[number].message_members()
        return {"message": message, "logprobs": request.texts.chat(choice.logprobs) if request.wants_logprobs else None}

    def response_members(self) -> dict[str, Any]:
        return self.prompt_object(0)
