"""Serialization of answers: complete, or chunk by chunk as server-sent events."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from stack_core.abi.generation import GenerationUpdate, TokenLogprob
from stack_serve.http.slices import Each, Members, json_pieces
from stack_serve.openai.errors import ApiError, error_object
from stack_serve.openai.offsets import TextOffsets
from stack_serve.openai.request import ApiRequest, Usage

__all__ = ["DONE", "Choice", "Serializer"]

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """A continuation, as far as it came.

    Attributes:
      offsets: counts the offsets of its tokens; made with the first log-probability.
    """

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False
    offsets: TextOffsets | None = None


class Serializer(ABC):
    """Serializes the response to one request.

    Constant parts of chunks are serialized once. Large parts are produced in pieces that take well below a
    millisecond.

    Attributes:
      head: start of each event, with the members of the envelope.
    """

    response_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: ApiRequest) -> None:
        self.request = request
        self.usage = Usage(sum(len(prompt.tokens) for prompt in request.prompts))
        self.choices = [Choice() for _ in range(len(request.prompts) * request.sampling.n)]
        self.prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        envelope = {"id": request.id, "object": self.chunk_object, "created": request.created, "model": request.model}
        # Without the closing brace: each chunk appends its choices.
        self.head = b"data: " + orjson.dumps(envelope)[:-1]

    def read(self, number: int, update: GenerationUpdate) -> bool:
        """Reads the text of an update; returns whether the client would see a change."""
        return bool(update.text)

    def finish_reason(self, number: int) -> str | None:
        """Returns the reason for clients why a continuation finished, or None."""
        return self.choices[number].finish_reason

    @abstractmethod
    def opening(self, prompt: int, number: int) -> bytes:
        """The first chunk of a continuation, or nothing."""

    @abstractmethod
    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """Returns the members of a chunk's choice with text and log-probabilities; each ends with a comma.

        Args:
          first: True if this is the first update of its continuation.
        """

    @abstractmethod
    def choice_members(self, prompt: int, number: int) -> dict[str, Any]:
        """Returns the interface-specific members of a complete answer's choice."""

    def note(self, prompt: int, update: GenerationUpdate) -> int:
        """Counts an update, and returns the number of its continuation."""
        number = self.request.choice(prompt, update)
        # Tokens behind a stop text were generated, so they count.
        self.usage.completion_tokens += len(update.tokens) + update.dropped_tokens
        choice = self.choices[number]
        # Every update repeats the count, and the continuations of a prompt share the cached tokens.
        if update.cached_tokens and update.index == 0 and not choice.begun:
            self.usage.cached_tokens += update.cached_tokens
        if update.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = update.prompt_logprobs
        if update.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_reason
        return number

    def chunk(self, prompt: int, update: GenerationUpdate) -> Iterator[bytes]:
        """Yields the events of an update in pieces; empty if the client would see no change."""
        number = self.note(prompt, update)
        choice = self.choices[number]
        first, choice.begun = not choice.begun, True
        if first:
            yield self.opening(prompt, number)
        request = self.request
        shown = bool(update.tokens) and (request.wants_logprobs or request.wants_token_ids)
        if not (self.read(number, update) or update.finish_reason or shown or (first and request.echo)):
            return
        yield b'%b,"choices":[{"index":%d,' % (self.head, number)
        yield from self.delta(prompt, number, update, first=first)
        parts = [b'"finish_reason":null']
        if update.finish_reason is not None:
            reasons = orjson.dumps(self.finish_reason(number)), orjson.dumps(update.stop_reason)
            parts = [b'"finish_reason":%b,"stop_reason":%b' % reasons]
        if request.wants_token_ids:
            parts.append(b',"token_ids":' + orjson.dumps(update.tokens))
        parts.append(b"}]")
        parts.append(self.continuous_usage())
        parts.append(b"}\n\n")
        yield b"".join(parts)

    def last_chunk(self) -> bytes:
        """Returns the events after the last continuation."""
        if not self.request.stream_options.include_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self.head, orjson.dumps(self.usage.as_object()), DONE)

    def add(self, prompt: int, update: GenerationUpdate) -> None:
        """Stores an update for the complete answer."""
        number = self.note(prompt, update)
        self.read(number, update)
        choice = self.choices[number]
        choice.begun = True
        choice.text.append(update.text)
        choice.tokens += update.tokens
        choice.logprobs += update.logprobs or ()

    def full_response(self) -> Iterator[bytes]:
        """The answer to a request that does not stream, in pieces."""
        request = self.request
        answer = {
            "id": request.id,
            "object": self.response_object,
            "created": request.created,
            "model": request.model,
            "choices": Each(self._full_choice(*each) for each in enumerate(self._best())),
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage.as_object(),
            **self.response_members(),
        }
        return json_pieces(Members(answer))

    def _best(self) -> Iterator[int]:
        """Yields the continuations in the answer: all of each prompt, or its most likely ones."""
        count, best = self.request.sampling.n, self.request.best
        for start in range(0, len(self.choices), count):
            numbers = range(start, start + count)
            yield from numbers if best is None else sorted(numbers, key=self._mean_logprob, reverse=True)[:best]

    def _mean_logprob(self, number: int) -> float:
        logprobs = self.choices[number].logprobs
        # A continuation without tokens ranks last.
        return sum(each.logprob for each in logprobs) / len(logprobs) if logprobs else -math.inf

    def _full_choice(self, place: int, number: int) -> Members:
        choice, request = self.choices[number], self.request
        return Members(
            {
                "index": place,
                **self.choice_members(number // request.sampling.n, number),
                "finish_reason": self.finish_reason(number),
                "stop_reason": choice.stop_reason,
                "token_ids": choice.tokens if request.wants_token_ids else None,
            }
        )

    def response_members(self) -> dict[str, Any]:
        """Returns the interface-specific members of a complete answer."""
        return {}

    def prompt_object(self, prompt: int) -> dict[str, Any]:
        """Returns vLLM's members about a prompt; null unless requested."""
        logprobs = (
            self.request.texts.prompt(self.prompt_logprobs[prompt]) if self.request.wants_prompt_logprobs else None
        )
        tokens = self.request.prompts[prompt].tokens if self.request.wants_token_ids else None
        return {"prompt_logprobs": logprobs, "prompt_token_ids": tokens}

    def error_event(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream, in the form that OpenAI's clients recognize."""
        return b"data: %b\n\n%b" % (orjson.dumps(error_object(error)), DONE)

    def continuous_usage(self) -> bytes:
        """The member `usage` of a chunk, if each is to have one."""
        if not self.request.stream_options.continuous_usage_stats:
            return b""
        return b',"usage":' + orjson.dumps(self.usage.as_object())
