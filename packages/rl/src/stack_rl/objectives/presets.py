"""The algorithms of papers, each a choice of token loss, bounds, advantage and weights."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.training import Objective
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
    """A policy gradient whose ratios are clipped.

    Attributes:
      clip_low, clip_high: how far a ratio may move before its token stops to learn.
      dual_clip: the loss of a token with A < 0 is at most -dual_clip A; None does not bound it.
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
        """The ratio that is clipped."""
        return tokens.log_ratio


@config
class GRPOConfig(ClippedConfig):
    """Group relative policy optimization.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = (reward - mean of the group) / std of the group

    Source: Shao et al., DeepSeekMath, 2024 (arXiv:2402.03300), equation 3. Departures: (1) no KL by default, where the
    paper has 0.04; (2) k2 rather than k3.
    """

    name: Literal["grpo"] = "grpo"


@config
class DrGRPOConfig(ClippedConfig):
    """GRPO done right: neither the group's deviation nor an answer's length divides.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = reward - mean of the group, w = 1 / (B most_tokens)

    Source: Liu et al., Understanding R1-Zero-like training, 2025 (arXiv:2503.20783), section 3.2.
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: ClassVar[str] = "centred"
    weights: ClassVar[str] = "constant"


@config
class DAPOConfig(ClippedConfig):
    """Decoupled clip and dynamic sampling: likely tokens may grow more than they may shrink; tokens weigh the same.

        l = -min(r A, clip(r, 1 - 0.2, 1 + 0.28) A), A = (reward - mean of the group) / std of the group, w = 1 / N

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), equation 8. Drawing other groups in place of flat ones is the
    data's part, `data.refill_rounds`, and so is charging long answers: `data.environment.overlong_tokens` of prompts.
    """

    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    weights: ClassVar[str] = "token"


@config
class GSPOConfig(ClippedConfig):
    """Group sequence policy optimization: the ratio of a whole answer is clipped.

        l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the answer of log r)

    Source: Zheng et al., Group sequence policy optimization, 2025 (arXiv:2507.18071), equation 5 and section 5.1.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4

    def log_ratio(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return sequence_mean(tokens.log_ratio, tokens.drawn, tokens.segment_ids)


@config
class RLOOConfig(PolicyConfig):
    """REINFORCE with the mean of the other answers as its baseline.

        l = -A log p, A = reward - mean of the rewards of the group's others

    An answer is one action, so its log-probability is the sum over its tokens: `data.weights: sum` is that up to the
    number of answers; the default divides by it with a constant.

    Source: Ahmadian et al., Back to basics, 2024 (arXiv:2402.14740). Departures: (1) 1 / (B most_tokens) instead of
    1 / B, which a learning rate takes up.
    """

    name: Literal["rloo"] = "rloo"
    advantage: ClassVar[str] = "leave_one_out"
    weights: ClassVar[str] = "constant"

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return reinforce_loss(tokens.logprobs, tokens.advantages)


@config
class ReinforceConfig(ClippedConfig):
    """REINFORCE++ with the group's baseline: rewards less their group's mean, whitened over the whole batch.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = (reward - mean of the group) / std of the batch

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262).
    """

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: ClassVar[str] = "whitened"
    weights: ClassVar[str] = "token"


@config
class CISPOConfig(PolicyConfig):
    """Clips the weight of a token instead of the token: rare ones that open a thought keep learning.

        l = -sg[clip(r, lowest, highest)] A log p

    r is the ratio to the behaviour, and so the correction: there is no other one by default.

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
    """On-policy distillation: at every token that the student drew, it goes towards the teacher; rewards count nothing.

        l = kl (log p - log p_teacher)^2 / 2, whose expected gradient is that of kl KL(p || p_teacher) at the token

    It is the divergence of every policy gradient, with the teacher as the reference, alone.

    Attributes:
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
