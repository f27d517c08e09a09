"""A parsed request, with its sampling parameters and response options."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import GenerationUpdate, SamplingParams
from stack_serve.openai.errors import ApiError
from stack_serve.openai.logprobs import LogprobWriter
from stack_serve.openai.messages import ParsedMessage
from stack_serve.openai.prompts import Prompt
from stack_serve.openai.schemas import StreamOptions

__all__ = ["ApiRequest", "Usage", "failure_of", "new_id"]


def new_id() -> str:
    """Returns a random id."""
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A parsed request.

    Attributes:
      id: id of the response.
      adapter: name of the adapter that continues the prompts, or None.
      created: time in seconds since 1970.
      texts: writer of tokens and log-probabilities.
      tokenizer: the model's tokenizer, or None if it has none.
      best: number of continuations to return per prompt, by mean log-probability. None returns all.
      echo: text to prepend to the continuations of each prompt. Empty if the prompts are not echoed.
      nothing_new: True if only the prompt is requested. The engine still generates one token.
      role: role of the message in a chat response.
      operation: name of the operation in traces.
      start_parsing: starts to parse a continuation into content, reasoning and tool calls. None returns its text.
    """

    id: str
    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    texts: LogprobWriter
    tokenizer: Tokenizer | None = None
    adapter: str | None = None
    best: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    wants_token_ids: bool = False
    echo: tuple[str, ...] = ()
    nothing_new: bool = False
    role: str = "assistant"
    operation: Literal["chat", "text_completion"] = "chat"
    start_parsing: Callable[[], ParsedMessage] | None = None

    def choice(self, prompt: int, update: GenerationUpdate) -> int:
        """Returns the index of a continuation among all continuations of the request."""
        return prompt * self.sampling.n + update.index


@dataclass
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_object(self) -> dict[str, object]:
        """Returns the usage object of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def failure_of(update: GenerationUpdate, timeout_s: float | None) -> ApiError | None:
    """Returns the error of a continuation that failed, timed out or was aborted, otherwise None."""
    if update.finish_reason == "error":
        return ApiError(500, update.error or "The generation failed.")
    if update.finish_reason == "deadline":
        limit = f" of {timeout_s:g} s" if timeout_s is not None else ""
        return ApiError(504, f"The request did not end within the server's limit{limit}. Ask for fewer tokens.")
    if update.finish_reason == "abort":
        return ApiError(503, "The server ended the request before it was done. Send it again.")
    return None
