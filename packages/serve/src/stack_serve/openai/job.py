"""A request that was understood: what to generate, and how to answer."""

import secrets
import time
from dataclasses import dataclass, field

from stack_core.abi.data import Tokenizer
from stack_core.abi.generation import GenerationUpdate, SamplingParams
from stack_serve.openai.errors import ApiError
from stack_serve.openai.logprobs import LogprobWriter
from stack_serve.openai.prompts import Prompt
from stack_serve.openai.schemas import StreamOptions

__all__ = ["Job", "Usage", "failure_of", "new_id"]


def new_id() -> str:
    """An id that no other has."""
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request.

    Attributes:
      id: of the answer.
      adapter: the name of the adapter that continues the prompts, or None.
      created: seconds since 1970.
      texts: writes tokens and log-probabilities.
      tokenizer: the model's tokenizer, if it has one.
      best: number of continuations in the answer for each prompt, by their mean log-probability; None is all.
      echo: texts that the continuations begin with, one for each prompt; empty for none.
      nothing_new: only the prompt is wanted; an engine generates a token all the same.
      role: of a chat's answer.
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

    def choice(self, prompt: int, update: GenerationUpdate) -> int:
        """Number of a continuation among all of the request."""
        return prompt * self.sampling.n + update.index


@dataclass
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_object(self) -> dict[str, object]:
        """In OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def failure_of(update: GenerationUpdate, timeout_s: float | None) -> ApiError | None:
    """What to tell the client of a continuation that did not end by itself."""
    if update.finish_reason == "error":
        return ApiError(500, update.error or "The generation failed.")
    if update.finish_reason == "deadline":
        limit = f" of {timeout_s:g} s" if timeout_s is not None else ""
        return ApiError(504, f"The request did not end within the server's limit{limit}. Ask for fewer tokens.")
    if update.finish_reason == "abort":
        return ApiError(503, "The server ended the request before it was done. Send it again.")
    return None
