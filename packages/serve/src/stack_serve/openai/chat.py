"""Responses of `POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

import orjson

from stack_core.abi.generation import GenerationUpdate
from stack_serve.http.slices import json_pieces
from stack_serve.openai.writer import Writer

__all__ = ["ChatWriter"]


class ChatWriter(Writer):
    """Writer of chat responses."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, prompt: int, number: int) -> bytes:
        """Returns the first chunk, which has the role and no text."""
        role = orjson.dumps(self.job.role)
        tokens = b',"prompt_token_ids":' + orjson.dumps(self.job.prompts[prompt].tokens)
        return b"".join(
            (
                self.head,
                b',"choices":[{"index":%d,"delta":{"role":%b,"content":""}' % (number, role),
                b',"logprobs":null,"finish_reason":null}]',
                tokens if self.job.wants_token_ids else b"",
                self.continuous_usage(),
                b"}\n\n",
            )
        )

    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """Returns the delta with the text. It is empty in a chunk that only ends the message, as in OpenAI's API."""
        text = b'"content":' + orjson.dumps(update.text) if update.text or update.tokens else b""
        if not (self.job.wants_logprobs and update.logprobs):
            return (b'"delta":{%b},"logprobs":null,' % text,)
        return (b'"delta":{%b},"logprobs":' % text, *json_pieces(self.job.texts.chat(update.logprobs)), b",")

    def choice_members(self, prompt: int, number: int) -> dict[str, Any]:
        choice, job = self.choices[number], self.job
        message = {
            "role": job.role,
            "content": "".join(choice.text),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {"message": message, "logprobs": job.texts.chat(choice.logprobs) if job.wants_logprobs else None}

    def response_members(self) -> dict[str, Any]:
        return self.prompt_object(0)
