"""Published algorithms as config values, whose defaults are the settings of their papers."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.objectives import Objective
from stack_rl.math.policy import cispo_loss, clipped_loss, is_clipped, is_outside, reinforce_loss
from stack_rl.math.sequences import sequence_mean
from stack_rl.objectives.policy import Advantage, LossAggregation, PolicyConfig, PolicyTokens
from stack_rl.objectives.settings import Correction, Overlong

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
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None

    of_ratio: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")

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

    One update per batch, equal weight per answer, and the KL divergence from the initial policy in the loss.

    Attributes:
      name: selects this objective.

    Source: Shao et al., DeepSeekMath, 2024 (arXiv:2402.03300), equations 3 and 4, section 4.2. Departures: (1) the
    paper does not give the clip bounds; 0.2 is PPO's.
    """

    name: Literal["grpo"] = "grpo"
    kl: NonNegativeFloat = 0.04
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"


@config
class DrGRPOConfig(ClippedConfig):
    """GRPO done right: divides neither by the group's standard deviation nor by the answer's length.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A = reward - mean of the group, w = 1 / (B max_tokens)

    One update per batch, without a KL divergence.

    Attributes:
      name: selects this objective.

    Source: Liu et al., Understanding R1-Zero-like training, 2025 (arXiv:2503.20783), section 3.2. Departures: (1)
    max_tokens is `data.seq_tokens`, which includes the prompt, a constant factor of the learning rate.
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = "centred"
    loss_aggregation: LossAggregation = "constant"


@config
class DAPOConfig(ClippedConfig):
    """Decoupled clip and dynamic sampling policy optimization.

        l = -min(r A, clip(r, 1 - 0.2, 1 + 0.28) A), A = (reward - mean of the group) / std of the group, w = 1 / N

    Sixteen updates per batch, equal weight per token, groups with equal rewards replaced by new ones, a penalty on
    answers near their limit, and no KL divergence.

    Attributes:
      name: selects this objective.
      clip_high: distance that a ratio may move above 1 before its token stops learning. It exceeds `clip_low`, which
        lets unlikely tokens gain probability.

    Source: Yu et al., DAPO, 2025 (arXiv:2503.14476), equations 8, 11 and 13, section 4.1. Departures: (1) at most 10
    batches of groups are sampled to fill one, while the paper sets no limit; 10 is the limit of the authors' recipe in
    verl.
    """

    name: Literal["dapo"] = "dapo"
    loss_aggregation: LossAggregation = "token"
    clip_high: PositiveFloat = 0.28
    refill_rounds: NonNegativeInt = 9
    overlong: Overlong | None = Overlong()
    minibatches: PositiveInt = 16


@config
class GSPOConfig(ClippedConfig):
    """Group sequence policy optimization: clips one ratio per answer instead of per token.

        l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the answer of log r)

    Four updates per batch, equal weight per answer, and no KL divergence.

    Attributes:
      name: selects this objective.
      clip_low, clip_high: distance that s may move below and above 1 before its answer stops learning. They are small
        because s, a geometric mean over an answer, varies less than the ratios of tokens.

    Source: Zheng et al., Group sequence policy optimization, 2025 (arXiv:2507.18071), equation 5 and section 5.1.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4
    minibatches: PositiveInt = 4

    def log_ratio(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return sequence_mean(tokens.log_ratio, tokens.drawn, tokens.segment_ids)


@config
class RLOOConfig(PolicyConfig):
    """REINFORCE with the mean reward of the group's other answers as the baseline.

        l = -A log p, A = R - mean of R of the group's others, R = reward - kl log p(answer) / p_ref(answer), w = 1 / B

    An answer is one action, so its log-probability is the sum over its tokens. One update per batch.

    Attributes:
      name: selects this objective.

    Source: Ahmadian et al., Back to basics, 2024 (arXiv:2402.14740), equations 2 and 6. Departures: (1) kl depends on
    the task in the paper; 0.05 is the value in TRL.
    """

    name: Literal["rloo"] = "rloo"
    advantage: Advantage = "leave_one_out"
    loss_aggregation: LossAggregation = "sequence_sum"
    kl: NonNegativeFloat = 0.05
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"

    reads_ratio: ClassVar[bool] = False

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return reinforce_loss(tokens.logprobs, tokens.advantages)


@config
class ReinforceConfig(ClippedConfig):
    """REINFORCE++: rewards minus the KL divergence of the tokens ahead, whitened over the batch, with clipped ratios.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), A_t = whitened(reward - kl sum_{s >= t} k1_s)

    No group baseline: `advantage: whitened` with `kl_in: loss` and `kl_estimator: k2` is the paper's variant with the
    group's mean as the baseline. One update per batch.

    Attributes:
      name: selects this objective.

    Source: Hu et al., REINFORCE++, 2025 (arXiv:2501.03262), equations 8 to 10. Departures: (1) kl depends on the task
    in the paper; 0.01 is the default of OpenRLHF, the authors' implementation.
    """

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: Advantage = "returns"
    loss_aggregation: LossAggregation = "token"
    kl: NonNegativeFloat = 0.01
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"


@config
class CISPOConfig(PolicyConfig):
    """REINFORCE with clipped importance weights: no token is left out, so rare but pivotal ones keep learning.

        l = -sg[clip(r, lowest, highest)] A log p, A = (reward - mean of the group) / std of the group, w = 1 / N

    Sixteen updates per batch, equal weight per token, and no KL divergence. r is the ratio to the behaviour, so it
    already acts as the correction.

    Attributes:
      name: selects this objective.
      correction: additional correction; None by default, because r is one.
      lowest, highest: bounds of the ratio r.

    Source: MiniMax-M1, 2025 (arXiv:2506.13585), section 3.1. Departures: (1) the paper names no bounds; see
    `stack_rl.math.policy.cispo_loss`. (2) `refill_rounds` and `overlong` are off; the paper's experiments borrow both
    from DAPO.
    """

    name: Literal["cispo"] = "cispo"
    loss_aggregation: LossAggregation = "token"
    correction: Correction | None = None
    lowest: NonNegativeFloat = 0.0
    highest: PositiveFloat = 5.0
    minibatches: PositiveInt = 16

    of_ratio: ClassVar[tuple[str, ...]] = ("lowest", "highest")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest >= self.highest:
            raise ConfigError(
                f"objective.lowest is {self.lowest} and objective.highest is {self.highest}, between which no ratio "
                "lies. Give lowest < highest."
            )

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        bounds = {"lowest": self.lowest, "highest": self.highest}
        return cispo_loss(tokens.logprobs, tokens.log_ratio, tokens.advantages, **bounds)

    def metrics(self, tokens: PolicyTokens) -> Mapping[str, Shaped[Array, "batch seq"]]:
        return {"clipped": is_outside(tokens.log_ratio, lowest=self.lowest, highest=self.highest)}


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
    advantage: Advantage = "centred"
    loss_aggregation: LossAggregation = "token"
    kl: PositiveFloat = 1.0

    reads_ratio: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_unread(("advantage", "overlong", "refill_rounds"), "distill ignores rewards", "name: grpo")
        if self.kl_in == "reward":
            raise ConfigError("objective.kl_in is 'reward', but distill ignores rewards. Leave it out.")
        if self.updates > 1:
            raise ConfigError(
                f"objective.epochs is {self.epochs} and objective.minibatches is {self.minibatches}, but the loss of "
                "distill is a divergence on the student's own samples, which a second update no longer has. Set both "
                "to 1."
            )

    def build(self) -> Objective:
        if self.reference == "init":
            raise ConfigError("objective.reference is the model itself. Name the teacher's run: run:DIRECTORY.")
        return super().build()

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        return jnp.zeros_like(tokens.logprobs)
