"""Nested settings of an algorithm: the correction and the handling of long answers."""

from typing import Annotated, Literal

import jax
from jaxtyping import Array, Float
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_rl.math import corrections

__all__ = ["Correction", "Overlong"]


@config
class Correction:
    """Importance weights: the ratio of the policy to the behaviour that sampled the tokens, without a gradient.

    Attributes:
      kind: "truncate" caps ratios at `high`; "mask" drops tokens whose ratio is outside `low` to `high`.
      level: ratio of a token: its own ("token"), or its sequence's geometric mean ("sequence_mean") or product
        ("sequence_product").
      low: smallest ratio kept by "mask"; 0 sets no lower bound.
      high: largest ratio, for both kinds.

    Source: see `stack_rl.math.corrections`.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: corrections.Level = "token"
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        if self.low >= self.high or (self.low and self.kind == "truncate"):
            raise ConfigError(
                f"objective.correction keeps ratios from {self.low} to {self.high} by {self.kind!r}. Give low < high, "
                "and low only with kind: mask."
            )

    def weights(self, log_ratio: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> Float[Array, "batch seq"]:
        leveled = corrections.leveled(log_ratio, mask, segment_ids, self.level)
        if self.kind == "truncate":
            return corrections.truncate(leveled, cap=self.high)
        return corrections.mask(leveled, low=self.low, high=self.high)


@config
class Overlong:
    """Handling of answers near their token limit.

    Attributes:
      kind: "penalize" subtracts up to 1 from the reward of an answer in the last part of its limit, linearly in its
        length; "mask" excludes answers that were cut by their limit from the loss.
      buffer_fraction: for "penalize": length of the penalized part, as a fraction of the limit. DAPO's 4,096 of 20,480
        tokens are 0.2.

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), section 3.4. Departures: (1) the length is a fraction, because
    answers of different tasks and models have different limits.
    """

    kind: Literal["penalize", "mask"] = "penalize"
    buffer_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2

    def __post_init__(self) -> None:
        if self.kind == "mask" and changed_fields(self, ("buffer_fraction",)):
            raise ConfigError(
                "objective.overlong.buffer_fraction would have no effect with kind: mask, which has no penalty. Leave "
                "it out, or set kind: penalize."
            )
