"""What a user says of sampling; `stack_core.ops.sampling.sampling` does it."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.generation import SamplingParams

__all__ = ["SamplingConfig"]


@config
class SamplingConfig:
    """How a continuation is chosen and where it ends.

    Attributes:
      max_tokens: tokens to generate, at most.
      temperature: what logits are divided by; 0 takes the most likely token each time.
      top_k: how many of the most likely tokens are candidates, and tokens as likely as the last; 0 is all.
      top_p: the most likely tokens whose probabilities first reach this sum are candidates, and tokens as likely as
        the last.
      seed: of the draws; the same seed gives the same text.
      stop: texts that end the continuation; they are not part of it.
    """

    max_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: NonNegativeInt = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The same as an engine takes it; stop texts are found by whoever has the text."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
