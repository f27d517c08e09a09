"""Requests to a generation engine and what it answers: plain values, which HTTP servers and rollouts use alike."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = [
    "MOST_STOP_CHARACTERS",
    "MOST_STOP_TEXTS",
    "EngineStats",
    "FinishReason",
    "GenerationRequest",
    "GenerationUpdate",
    "RequestTimes",
    "SamplingParams",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
"""Why a continuation ended: a stop token or text; a limit of tokens; its client; its deadline; a fault of its own."""

MOST_STOP_TEXTS, MOST_STOP_CHARACTERS = 16, 256
"""What a request may give of stop texts, and of characters in each: every token costs its share of them."""

_Penalty = Annotated[FiniteFloat, Field(ge=-2.0, le=2.0)]
_StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


@config
class SamplingParams:
    """How continuations of a prompt are chosen and where they end.

    A token's logit is changed in this order: bias, repetition penalty, frequency and presence penalty, temperature;
    then `top_k`, `min_p` and `top_p` leave candidates, of which one is drawn.

    Attributes:
      max_tokens: tokens to generate, at most; None is as many as there are positions.
      min_tokens: no stop token or stop text ends a continuation of fewer tokens. Stop tokens and the model's own end
        tokens are not sampled until then, even with `ignore_eos`.
      temperature: what logits are divided by; 0 takes the most likely token each time.
      top_k: how many of the most likely tokens are candidates, those as likely as the last among them; 0 is all.
      top_p: the most likely tokens whose probabilities first reach this sum are candidates, and those as likely as the
        last among them.
      min_p: so are tokens at least this share as likely as the most likely one.
      presence_penalty: what a token's logit loses if it was generated before.
      frequency_penalty: what it loses for each time.
      repetition_penalty: a positive logit of a token of the prompt or the continuation is divided by it, a negative
        one multiplied (Keskar et al., CTRL, 2019, arXiv:1909.05858).
      logit_bias: what is added to the logits of tokens.
      seed: of the draws, which depend on it and on the place in the continuation alone; None is a new one. The same
        seed gives the same text as long as logits are the same to the last bit, which they are not in every batch: now
        and then a token is drawn that is as likely within rounding, in bf16 more often than in fp32.
      stop: texts that end a continuation, and are no part of it unless `include_stop`; 16 of 256 characters at most.
      stop_tokens: tokens that do so besides the model's own end tokens.
      ignore_eos: the model's own end tokens do not end a continuation.
      skip_special_tokens: leave special tokens out of the text; otherwise the text has their names.
      n: continuations of the prompt, each with a seed of its own.
      logprobs: how many of the most likely tokens are reported with each token that is generated; None reports
        nothing, 0 the log-probability of the token itself.
      logprobs_of: whose those are: the "model", before any of the changes above, or the "processed" distribution that
        the token was drawn from, after all of them, in which the tokens that are no candidates have -inf.
      candidates: report the tokens that each token was drawn from, for who is to know the distribution later.
      prompt_logprobs: the model's for the tokens of the prompt, the first of which has none.
    """

    max_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt = 0
    temperature: Annotated[FiniteFloat, Field(ge=0.0)] = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[FiniteFloat, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0.0)] = 1.0
    logit_bias: dict[NonNegativeInt, FiniteFloat] = field(default_factory=dict)
    seed: int | None = None
    stop: Annotated[tuple[_StopText, ...], Field(max_length=MOST_STOP_TEXTS)] = ()
    include_stop: bool = False
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: PositiveInt = 1
    logprobs: NonNegativeInt | None = None
    logprobs_of: Literal["model", "processed"] = "model"
    candidates: bool = False
    prompt_logprobs: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to continue.

    Attributes:
      request_id: unique among those that the engine works on.
      prompt: its token ids, at least one.
      priority: of two requests that wait, the one with the lower number goes first; equal ones as they came. An engine
        may bound it, and lets what waits rise, so that every request begins; or it takes none but 0.
      adapter: the name of the adapter that continues it; None is the model without. An engine may have none.
      timeout_s: after so long, counted from `submit`, it ends with "deadline"; None never.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token where it stands.

    Attributes:
      rank: 1 for the most likely token.
      top: the most likely tokens with theirs, most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to a request, in seconds of `time.monotonic()`; None where they did not."""

    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationUpdate:
    """What became known of one continuation since the update before; the last one has `finish_reason`.

    Attributes:
      index: which of the `n` continuations.
      tokens: new ones.
      text: the text that became final with them; it may lag behind the tokens, as a character may need several.
      weights_versions: of the weights that drew each of `tokens`.
      logprobs: one for each of `tokens`, if they were asked for.
      candidates: the tokens that each of `tokens` was drawn from, in rising order, if they were asked for.
      prompt_logprobs: with the first update of continuation 0, which then comes before those of the others, if they
        were asked for: one for each token of the prompt, None for the first.
      stop_reason: the stop text or the token that ended it; None for the model's own end tokens.
      cached_tokens: tokens of the prompt whose keys and values had been kept from other requests.
      dropped_tokens: with the last update, how many tokens were generated besides, whose text is that of the stop text
        or behind it.
      times: with the last update.
      error: what went wrong, for people, if it ended with "error".
    """

    request_id: str
    index: int = 0
    tokens: tuple[int, ...] = ()
    text: str = ""
    weights_versions: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    dropped_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Attributes:
      running, waiting: continuations that have pages, and that have none.
      used_pages: pages of the cache that continuations hold; kept ones that none holds are free.
      prefix_queries_tokens, prefix_hits_tokens: tokens of prompts that were looked up among kept pages, and found.
      preemptions: continuations that lost their pages to others and were computed again.
      compilations: programs that were compiled after the engine was ready.
    """

    running: int
    waiting: int
    used_pages: int
    pages: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    compilations: int
