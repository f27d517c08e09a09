"""Configuration of the generation engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config, parse
from stack_core.abi.errors import ConfigError

__all__ = ["ANY_LAYOUT", "VLLM_NAMES", "CacheType", "EngineConfig", "PageLayout", "SpeculationConfig", "engine_config"]

CacheType = Literal["model", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]
PageLayout = Literal["phsd", "pshd", "hpsd", "psh2d"]

ANY_LAYOUT: Final[PageLayout] = "pshd"
"""The default layout if no other is faster: the keys of all heads of a token are contiguous."""

VLLM_NAMES: Final[Mapping[str, str]] = {
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "step_tokens",
    "max_model_len": "max_tokens",
}
"""vLLM's names of fields of `EngineConfig`, which `LLM` and `stack serve` accept as aliases."""

_Count = Annotated[int, Field(ge=1, le=2**16)]
"""Sizes of tables allocated at startup."""

_MATCHES = (2, 5)


@config
class SpeculationConfig:
    """Settings of speculative decoding, which does not change the outputs.

    Attributes:
      method: source of the drafts. "ngram" copies the continuation of the latest earlier occurrence of the last tokens
        in the prompt or the output. "draft" generates them with `EngineConfig.draft_model`, "mtp" with the model's own
        layer for multi-token prediction.
      tokens: maximum number of tokens drafted per sequence and step (vLLM: `num_speculative_tokens`).
      min_match, max_match: minimum and maximum number of last tokens that an earlier occurrence must match; the longest
        match is used (vLLM: `prompt_lookup_min`, `prompt_lookup_max`). They belong to "ngram".
    """

    method: Literal["ngram", "draft", "mtp"] = "ngram"
    tokens: Annotated[int, Field(ge=1, le=63)] = 7
    min_match: PositiveInt = _MATCHES[0]
    max_match: PositiveInt = _MATCHES[1]

    def __post_init__(self) -> None:
        if self.method != "ngram" and (self.min_match, self.max_match) != _MATCHES:
            raise ConfigError(
                f"speculation.min_match and max_match are for the method ngram, not for {self.method}. Leave them out."
            )
        if self.min_match > self.max_match:
            raise ConfigError(
                f"speculation.min_match={self.min_match} is more than max_match={self.max_match}. Lower it."
            )


def _parse_method(value: Any) -> Any:
    return {"method": value} if isinstance(value, str) else value


@config
class EngineConfig:
    """Capacity and scheduling settings of a generation engine.

    Attributes:
      max_sequences: maximum number of continuations that run concurrently; others wait.
      max_tokens: maximum total length of a prompt and its continuation; None means the model's `max_positions`.
      step_tokens: maximum number of tokens per step; prompts are split into chunks that share a step with decoding.
      decode_repeats: maximum number of decoding steps per program launch, used while no prompt can start and limited
        to about 40 ms. Clients receive the tokens of one launch together; 1 sends each token immediately.
      page_tokens: number of tokens per cache page.
      pages: number of cache pages; None means enough for `max_sequences` sequences of `max_tokens`, or as many as
        fit in memory.
      memory_fraction: fraction of the memory left free by the parameters that the cache may use if `pages` is None.
        None means 0.5, and on CPUs, whose memory other programs share, at most 2 GiB or a quarter, whichever is less,
        rounded down to a power of two.
      cache_dtype: dtype of the cached keys and values; "model" is the dtype in which the model computes them.
      page_layout: axis order of the page pool, in the notation of `ops.paged_attention`. None selects the best layout
        for the chip's implementations (see `ops.page_layout`), or "pshd" if no other is better.
      tensor: number of devices over which the heads and features of each layer are sharded.
      expert: number of devices over which the experts of a mixture are divided, besides the division by `tensor`. Each
        device computes its experts for all tokens of a step, and the rest of the layers as without `expert`.
      prefix_caching: keeps the pages of prompts for later requests with the same prefix. None enables it
        unless the model has recurrent states: these cannot be rewound to the token where another prompt diverges.
      adapters: adapter addresses, keyed by the names used in requests. An address is a run trained with adapters or a
        PEFT directory.
      max_adapters: maximum number of adapters on the devices; the least recently used idle adapter is evicted first.
      adapter_rank: maximum rank of adapters loaded later. None means the largest rank in `adapters`, which is also the
        lower bound; the result is rounded up to a power of two.
      embeddings: True if `warm_up` also compiles the programs of `embed`, which otherwise compile on first use.
      max_waiting: maximum number of waiting continuations (`n` per request); more are refused unless none is waiting.
      priorities: bound on request priorities, which are clipped to [-priorities, priorities] to prevent starvation;
        with 0, requests must not set a priority.
      dequantize: True reads the quantized weights of a GGUF file or `hf:` checkpoint as floats. This takes up to seven
        times the memory; products of many rows, as in long prompts, are faster.
      seed: seed of the generator that seeds requests without their own; None means a random seed.
      speculation: settings of speculative decoding, or its method alone; None disables it.
      draft_model: address of the model that drafts for the method "draft", such as a run or `hf:DIR`. It must have the
        tokens of the served model.
      logits_processors: registered logits processors that requests may select, in the order in which they apply.
    """

    max_sequences: _Count = 32
    max_tokens: PositiveInt | None = None
    step_tokens: PositiveInt = 512
    decode_repeats: PositiveInt = 8
    page_tokens: _Count = 16
    pages: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    cache_dtype: CacheType = "model"
    page_layout: PageLayout | None = None
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    prefix_caching: bool | None = None
    adapters: Mapping[str, str] = Field(default_factory=dict)
    max_adapters: _Count = 8
    adapter_rank: PositiveInt | None = None
    embeddings: bool = False
    max_waiting: PositiveInt = 1024
    priorities: NonNegativeInt = 0
    dequantize: bool = False
    seed: int | None = None
    speculation: Annotated[SpeculationConfig | None, BeforeValidator(_parse_method)] = None
    draft_model: str | None = None
    logits_processors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_sequences:
            raise ConfigError(
                f"step_tokens={self.step_tokens} is less than max_sequences={self.max_sequences}, but each sequence "
                "needs a token in every step. Raise step_tokens or lower max_sequences."
            )
        if self.pages is not None and self.memory_fraction is not None:
            raise ConfigError(
                "pages and memory_fraction (--pages, --memory-fraction) both set the size of the cache. Leave out one "
                "of them."
            )
        if len(set(self.logits_processors)) < len(self.logits_processors):
            raise ConfigError(f"logits_processors={self.logits_processors} names a processor twice. Name each once.")
        drafts = self.speculation is not None and self.speculation.method == "draft"
        if drafts and self.draft_model is None:
            raise ConfigError("speculation: the method draft needs a draft_model (--draft-model). Name one.")
        if self.draft_model is not None and not drafts:
            raise ConfigError(
                f"draft_model={self.draft_model!r} is for the method draft. Add speculation='draft' "
                "(--speculation draft), or leave it out."
            )


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Builds a config from its fields, some of which may have vLLM's names.

    Raises:
      ConfigError: a field is unknown or invalid, or has both of its names.
    """
    for alias, name in VLLM_NAMES.items():
        if alias in settings and name in settings:
            raise ConfigError(f"{alias} is vLLM's name of {name}, and both are set. Leave one of them out.")
    return parse(EngineConfig, {VLLM_NAMES.get(name, name): value for name, value in settings.items()})
