"""What a generation engine is made with."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError

__all__ = ["ANY_LAYOUT", "CacheType", "EngineConfig", "PageLayout"]

CacheType = Literal["model", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]
PageLayout = Literal["phsd", "pshd", "hpsd", "psh2d"]

ANY_LAYOUT: Final[PageLayout] = "pshd"
"""Where no layout is better: a token's keys of all heads lie together."""

_Count = Annotated[int, Field(ge=1, le=2**16)]
"""Sizes of tables that are made at the start."""


@config
class EngineConfig:
    """How much an engine holds and does at once.

    Attributes:
      max_sequences: continuations that run at once; others wait.
      max_tokens: of a prompt and its continuation together; None is the model's `max_positions`.
      step_tokens: tokens that one step computes, at most; prompts are cut into chunks to fit beside decoding.
      decode_repeats: steps of decoding that one program takes at most, while no prompt can begin and as long as that is
        40 ms; clients hear of their tokens together. 1 tells of each token as soon as it is known.
      page_tokens: tokens of a page of the cache.
      pages: of the cache; None is what `max_sequences` sequences of `max_tokens` need, or what fits in memory.
      memory_fraction: of the memory that the parameters leave free, what the cache may take where `pages` is None.
      cache_dtype: what keys and values are held in; "model" is what the model computes them in.
      page_layout: axes of a pool of pages, as `ops.paged_attention` names them. None is the layout that suits the
        implementations for the chip best, as `ops.page_layout` says, and "pshd" where none is better.
      tensor: devices that each layer's heads and features are split over.
      prefix_caching: keep pages of prompts for later requests that begin alike. None does for models whose every state
        lies in pages: a recurrent state is that of one token, and cannot be cut where another prompt branches off.
      adapters: addresses of adapters by the names that requests have for them: runs that were trained with adapters, or
        directories of PEFT.
      max_adapters: that lie on the devices at once; of those that nobody uses, the one used longest ago gives way.
      adapter_rank: the most that adapters may have which are loaded later; None is that of `adapters`. It is rounded up
        to a power of two.
      max_waiting: continuations that may wait, `n` for each request; more are refused, except where none wait.
      priorities: a request's priority counts from `-priorities` to `priorities`, so that none waits for ever; with 0
        requests may not have one.
      seed: of requests without one.
    """

    max_sequences: _Count = 32
    max_tokens: PositiveInt | None = None
    step_tokens: PositiveInt = 512
    decode_repeats: PositiveInt = 8
    page_tokens: _Count = 16
    pages: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    cache_dtype: CacheType = "model"
    page_layout: PageLayout | None = None
    tensor: PositiveInt = 1
    prefix_caching: bool | None = None
    adapters: Mapping[str, str] = Field(default_factory=dict)
    max_adapters: _Count = 8
    adapter_rank: PositiveInt | None = None
    max_waiting: PositiveInt = 1024
    priorities: NonNegativeInt = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_sequences:
            raise ConfigError(
                f"step_tokens={self.step_tokens} is less than max_sequences={self.max_sequences}, each of which needs "
                "a token of every step. Raise the one or lower the other."
            )
