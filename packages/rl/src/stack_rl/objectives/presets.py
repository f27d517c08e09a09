"""Published algorithms, each defined by a token loss, clip bounds, an advantage estimator and token weights."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.objectives import Objective
from stack_rl.math.policy import cispo_loss, clipped_loss, is_clipped, reinforce_loss
from stack_rl.math.sequences import sequence_mean
from stack_rl.objectives.policy import Correction, PolicyConfig, PolicyTokens

__all__ = [
    "CISPOConfig",
    "ClippedConfig",
    "DAPOConfig",
    "DistillConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "RLOOConfig",
    "ReinforceConfig",
]


@config
class ClippedConfig(PolicyConfig):
    """A policy gradient with clipped ratios.

    Attributes:
      clip_low, clip_high: distance that a ratio may move below and above 1, in the direction of the advantage, before
        its token stops learning.
      dual_clip: bound of the loss for tokens with A < 0, as a multiple of -A; None does not bound it.
    """

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: float | None = Field(default=None, gt=1.0)

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        bounds = {"low": self.clip_low, "high": self.clip_high}
        return clipped_loss(self.log_ratio(tokens), tokens.advantages, **bounds, dual=self.dual_clip)

    def metrics(self, tokens: PolicyTokens) -> Mapping[str, Shaped[Array, "batch seq"]]:
        bounds = {"low": self.clip_low, "high": self.clip_high}
        return {"clipped": is_clipped(self.log_ratio(tokens), tokens.advantages, **bounds)}

    def log_ratio(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        """Returns the log of the ratio that is clipped."""
        return tokens.log_ratio


@config
class GRPOConfig(ClippedConfig):
    """Group relative policy optimization.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = (reward - mean of the group) / std of the group

    Attributes:
      name: selects this objective.

    Source: Shao et al., DeepSeekMath, 2024 (arXiv:2402.03300), equation 3. Departures: (1) no KL by default, where the
    paper has 0.04; (2) k2 rather than k3.
    """

    name: Literal["grpo"] = "grpo"


@config
class DrGRPOConfig(ClippedConfig):
    """GRPO done right: divides neither by the group's standard deviation nor by the answer's length.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = reward - mean of the group, w = 1 / (B max_tokens)

    Attributes:
      name: selects this objective.

    Source: Liu et al., Understanding R1-Zero-like training, 2025 (arXiv:2503.20783), section 3.2.
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: ClassVar[str] = "centred"
    weights: ClassVar[str] = "constant"


@config
class DAPOConfig(ClippedConfig):
    """Decoupled clip and dynamic sampling policy optimization: a higher upper clip bound and equal token weights.

        l = -min(r A, clip(r, 1 - 0.2, 1 + 0.28) A), A = (reward - mean of the group) / std of the group, w = 1 / N

    Attributes:
      name: selects this objective.
      clip_high: distance that a ratio may move above 1 before its token stops learning. It exceeds `clip_low`, which
        lets unlikely tokens gain probability.

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), equation 8. Dynamic sampling is a setting of the data,
    `data.refill_rounds`, and so is the penalty on long answers, `data.environment.overlong_tokens` of `prompts`.
    """

    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    weights: ClassVar[str] = "token"


@config
class GSPOConfig(ClippedConfig):
    """Group sequence policy optimization: clips one ratio per answer instead of per token.

        l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the answer of log r)

    Attributes:
      name: selects this objective.
      clip_low, clip_high: distance that s may move below and above 1 before its answer stops learning. They are small
        because s, a geometric mean over an answer, varies less than the ratios of tokens.

    Source: Zheng et al., Group sequence policy optimization, 2025 (arXiv:2507.18071), equation 5 and section 5.1.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4

    def log_ratio(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return sequence_mean(tokens.log_ratio, tokens.drawn, tokens.segment_ids)


@config
class RLOOConfig(PolicyConfig):
    """REINFORCE with the mean reward of the group's other answers as the baseline.

        l = -A log p, A = reward - mean of the rewards of the group's others

    An answer is one action, so its log-probability is the sum over its tokens. `data.weights: sum` is the paper's loss
    times the number of answers; the default, "constant", also divides by a constant number of tokens.

    Attributes:
      name: selects this objective.

    Source: Ahmadian et al., Back to basics, 2024 (arXiv:2402.14740). Departures: (1) 1 / (B max_tokens) instead of 1 /
    B, a constant factor of the learning rate.
    """

    name: Literal["rloo"] = "rloo"
    advantage: ClassVar[str] = "leave_one_out"
    weights: ClassVar[str] = "constant"

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return reinforce_loss(tokens.logprobs, tokens.advantages)


@config
class ReinforceConfig(ClippedConfig):
    """REINFORCE++ with a group baseline: rewards minus the group's mean, whitened over the whole batch.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = (reward - mean of the group) / std of the batch

    Attributes:
      name: selects this objective.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262).
    """

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: ClassVar[str] = "whitened"
    weights: ClassVar[str] = "token"


@config
class CISPOConfig(PolicyConfig):
    """REINFORCE with clipped importance weights: no token is left out, so rare but pivotal ones keep learning.

        l = -sg[clip(r, lowest, highest)] A log p

    r is the ratio to the behaviour, so it already acts as the correction.

    Attributes:
      name: selects this objective.
      correction: additional correction; None by default, because r is one.
      lowest, highest: bounds of the ratio r.

    Source: MiniMax-M1, 2025 (arXiv:2506.13585), section 3.1. Departures: (1) the paper names no bounds; see
    `stack_rl.math.policy.cispo_loss`.
    """

    name: Literal["cispo"] = "cispo"
    correction: Correction | None = None
    lowest: NonNegativeFloat = 0.0
    highest: PositiveFloat = 5.0
    weights: ClassVar[str] = "token"

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        bounds = {"lowest": self.lowest, "highest": self.highest}
        return cispo_loss(tokens.logprobs, tokens.log_ratio, tokens.advantages, **bounds)


@config
class DistillConfig(PolicyConfig):
    """On-policy distillation: moves the student towards the teacher at every token it sampled, and ignores rewards.

        l = kl (log p - log p_teacher)^2 / 2, whose expected gradient is that of kl KL(p || p_teacher) at the token

    It is the KL term of every policy gradient without the policy loss; the teacher is the reference.

    Attributes:
      name: selects this objective.
      kl: weight of the divergence from the teacher.
      reference: the teacher, "run:DIRECTORY".

    Source: Lu et al., On-policy distillation, Thinking Machines Lab, 2025; Gu et al., MiniLLM, 2023 (arXiv:2306.08543).
    Departures: (1) the squared log ratio instead of the log ratio as an advantage, which has the same gradient.
    """

    name: Literal["distill"] = "distill"
    kl: PositiveFloat = 1.0
    advantage: ClassVar[str] = "centred"
    weights: ClassVar[str] = "token"

    def build(self) -> Objective:
        if self.reference == "init":
            raise ConfigError("objective.reference is the model itself. Name the teacher's run: run:DIRECTORY.")
        return super().build()

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return jnp.zeros_like(tokens.logprobs)
