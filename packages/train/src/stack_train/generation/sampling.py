"""Sampling settings of a user; see `stack_core.ops.sampling.sampling` for the op."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.generation import SamplingParams

__all__ = ["SamplingConfig"]


@config
class SamplingConfig:
    """Sampling settings and stop conditions of a continuation.

    Attributes:
      max_tokens: maximum number of generated tokens.
      temperature: divisor of the logits; 0 is greedy decoding.
      top_k: number of most likely tokens to sample from, plus ties with the last; 0 samples from all tokens.
      top_p: probability mass of the most likely tokens to sample from, plus ties with the last; 1 samples from all
        tokens.
      seed: seed of the sampling; the same seed gives the same text.
      stop: texts that end the continuation; the matched text is excluded.
    """

    max_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of an engine, without `stop`: only the caller has the text to search."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
