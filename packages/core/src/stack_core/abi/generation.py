"""Requests to a generation engine and its responses: plain values shared by HTTP servers and rollouts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt

from stack_core.abi.config import MayBeRemote, config
from stack_core.abi.errors import GenerationError

__all__ = [
    "MOST_STOP_CHARACTERS",
    "MOST_STOP_TEXTS",
    "Constraint",
    "EngineStats",
    "FinishReason",
    "GenerationRequest",
    "GenerationUpdate",
    "PromptImage",
    "RequestTimes",
    "SamplingParams",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
"""Why a continuation finished: stop token or text, token limit, abort by the client, deadline, or an internal error."""

MOST_STOP_TEXTS, MOST_STOP_CHARACTERS = 16, 256
"""Maximum number of stop texts and of characters in each; checking them costs time at every token."""

_Penalty = Annotated[FiniteFloat, Field(ge=-2.0, le=2.0)]
_LANGUAGES = ("json_schema", "regex", "choice", "grammar")
_Text = Annotated[str, MayBeRemote()]  # not a path
_StopText = Annotated[_Text, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


def _json_text(schema: Any) -> Any:
    return json.dumps(schema, ensure_ascii=False) if isinstance(schema, (Mapping, bool)) else schema


@config
class Constraint:
    """The formal language of a continuation; exactly one field defines it.

    Each step samples among the tokens that continue a text of the language, and end tokens if the text is complete. The
    continuation ends with the language, even with `ignore_eos` and before `min_tokens`.

    Attributes:
      json_schema: JSON Schema (mapping, boolean or JSON text); properties are generated in its order.
      regex: regular expression of the whole text, without look-around and backreferences.
      choice: texts, one of which is generated.
      grammar: context-free grammar; the engine "llm" reads Lark's syntax and GBNF.
      whitespace: regular expression of the space between JSON tokens; None lets the engine choose.
      reasoning_end: text that ends the reasoning before the constrained text; None means no reasoning.
      reasoning_begin: text that begins the reasoning, which may then be missing; None means that the prompt began it.
    """

    json_schema: Annotated[str | None, BeforeValidator(_json_text)] = None
    regex: _Text | None = None
    choice: Annotated[tuple[_Text, ...], Field(min_length=1)] | None = None
    grammar: _Text | None = None
    whitespace: _Text | None = None
    reasoning_end: _Text | None = None
    reasoning_begin: _Text | None = None

    def __post_init__(self) -> None:
        given = [name for name in _LANGUAGES if getattr(self, name) is not None]
        if len(given) != 1:
            message = f"A constraint has exactly one of {', '.join(_LANGUAGES)}; given: {', '.join(given) or 'none'}."
            raise GenerationError(message, parameter="constraint")
        if self.whitespace is not None and self.json_schema is None:
            raise GenerationError(f"whitespace needs json_schema, not {given[0]}. Omit it.", parameter="constraint")
        if "" in (self.reasoning_end, self.reasoning_begin) or (self.reasoning_begin and not self.reasoning_end):
            message = "reasoning_begin needs a reasoning_end, and neither may be empty."
            raise GenerationError(message, parameter="constraint")


@config
class SamplingParams:
    """Sampling and stopping settings of the continuations of a prompt.

    Logits are processed in this order: constraint, bias, repetition penalty, frequency and presence penalty, logits
    processors, temperature. Then `top_k`, `min_p` and `top_p` filter the candidates, and one of them is sampled.

    Attributes:
      max_tokens: maximum number of generated tokens; None means as many as there are positions.
      min_tokens: minimum number of generated tokens. Until then stop tokens and the model's own end tokens are not
        sampled, even with `ignore_eos`, and stop texts do not end the continuation.
      temperature: divisor of the logits; 0 selects the most likely token at each step (greedy decoding).
      top_k: number of most likely tokens that remain candidates, plus ties with the last of them; 0 keeps all.
      top_p: cumulative probability of the most likely tokens that remain candidates, plus ties with the last of them.
      min_p: minimum probability of a candidate relative to the most likely token.
      presence_penalty: subtracted from the logit of each token that was generated before.
      frequency_penalty: subtracted from a token's logit once for each time that it was generated.
      repetition_penalty: divisor of the positive logits, and factor of the negative logits, of tokens in the prompt or
        the continuation (Keskar et al., CTRL, 2019, arXiv:1909.05858).
      logit_bias: values added to the logits, by token id.
      seed: seed of the sampling; None picks a new one. The same seed gives the same text if the logits are bitwise
        equal. Other batch compositions may round them differently, and then tokens may differ, most often in bf16.
      stop: at most 16 texts of at most 256 characters that end a continuation; omitted unless `include_stop` is set.
      include_stop: whether the output includes the stop text.
      stop_tokens: token ids that end a continuation, in addition to the model's own end tokens.
      ignore_eos: whether generation continues past the model's own end tokens.
      skip_special_tokens: whether special tokens are omitted from the text; otherwise the text shows their names.
      n: number of continuations of the prompt, each with its own seed.
      logprobs: number of most likely tokens reported with each generated token; 0 reports only the token's own
        log-probability, None reports nothing.
      logprobs_of: distribution that `logprobs` describes: "model", before all changes above, or "processed", after all
        of them. The latter is the distribution that tokens are sampled from; tokens that are not candidates have -inf.
      candidates: whether to report the candidates of each sampled token, for callers that recompute the distribution.
      experts: whether to report each token's experts.
      prompt_logprobs: number of most likely tokens reported with each prompt token, under the model's distribution; the
        first prompt token has no log-probability. None reports nothing.
      constraint: language that contains the continuation; None allows any text. The log-probabilities of "model"
        ignore it; in "processed", the tokens that it excludes have -inf.
      logits_processors: parameters of selected logits processors by name: a mapping, or the only parameter's value.
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
    experts: bool = False
    prompt_logprobs: NonNegativeInt | None = None
    constraint: Constraint | None = None
    logits_processors: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt.

    Attributes:
      start: place of the first image token.
      tokens: number of image tokens.
      pixels: pixels of an `ImageReader`.
      digest: hash of the pixels and the grid.
      layout: relations between the tokens; see `stack_core.text.images.ImageReader`.
      grid: rows and columns of the tokens; None if images have one size.
    """

    start: int
    tokens: int
    pixels: Any
    digest: bytes
    layout: Literal["whole", "text", "rows", "axes"]
    grid: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """Place after the last image token."""
        return self.start + self.tokens + (self.grid[0] - 1 if self.grid and self.layout == "rows" else 0)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to continue.

    Attributes:
      request_id: identifier, unique among the engine's current requests.
      prompt: token ids, at least one.
      sampling: sampling and stopping settings.
      priority: scheduling priority. Waiting requests with lower numbers go first, and equal numbers in order of
        arrival. An engine may clamp the value, and raises waiting requests over time to avoid starvation; or it accepts
        only 0.
      timeout_s: seconds from `submit` until the request finishes with "deadline"; None means no deadline.
      adapter: name of the adapter to apply; None is the base model. An engine may support no adapters.
      images: images of the prompt in order; an engine may support none.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    adapter: str | None = None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token at its position.

    Attributes:
      token: token id.
      logprob: its log-probability.
      rank: rank of the token, 1 for the most likely.
      top: most likely (token, log-probability) pairs, most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestTimes:
    """Timestamps of a request in seconds of `time.monotonic()`; None for stages that it did not reach."""

    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationUpdate:
    """New output of a continuation since its previous update; the last update has a `finish_reason`.

    Attributes:
      request_id: the request.
      index: which of the `n` continuations.
      tokens: new token ids.
      text: text that became final with the tokens. It may lag behind them, since one character may need several tokens.
      weights_versions: version of the weights that sampled each of `tokens`.
      logprobs: one entry for each of `tokens`, if requested.
      candidates: candidates of each of `tokens` in ascending order, if requested.
      experts: int16[inputs, mixtures, active], if requested: experts of the model's inputs since the last update. The
        inputs of a whole continuation are its prompt and its tokens except the last.
      prompt_logprobs: one entry for each prompt token, None for the first, if requested. They come with the first
        update of continuation 0, which then precedes the updates of the other continuations.
      finish_reason: why the continuation finished; None before its last update.
      stop_reason: stop text or token that ended the continuation; None for the model's own end tokens.
      cached_tokens: number of prompt tokens found in the prefix cache.
      dropped_tokens: in the last update, the number of additional generated tokens, whose text is or follows the stop
        text.
      times: timestamps, in the last update.
      error: human-readable cause, if the finish reason is "error".
    """

    request_id: str
    index: int = 0
    tokens: tuple[int, ...] = ()
    text: str = ""
    weights_versions: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    experts: Any = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    dropped_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine was created, and its current load.

    Attributes:
      running: number of continuations that hold pages.
      waiting: number of continuations without pages.
      used_pages: number of cache pages held by continuations; pages that only the prefix cache holds count as free.
      pages: total number of pages.
      steps: number of engine steps.
      prompt_tokens: number of prompt tokens.
      generated_tokens: number of generated tokens.
      prefix_queries_tokens: number of prompt tokens looked up in the prefix cache.
      prefix_hits_tokens: number of prompt tokens found in the prefix cache.
      preemptions: number of times a continuation lost its pages to another and was recomputed.
      compilations: number of programs compiled after the engine was ready.
      drafts: number of times that drafted tokens of a continuation were verified (speculative decoding).
      drafted_tokens: number of drafted tokens.
      accepted_tokens: number of drafted tokens that were generated.
      programs_to_compile: number of programs that still compile in the background.
      weights_version: version of the current weights (see `Engine.update_weights`).
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
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    programs_to_compile: int = 0
    weights_version: int = 0

    @property
    def acceptance(self) -> float | None:
        """Fraction of the drafted tokens that were generated; None without drafts."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None
