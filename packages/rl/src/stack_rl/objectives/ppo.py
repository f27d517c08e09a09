"""Proximal policy optimization (PPO), with a critic for token-level advantages."""

from typing import Annotated, ClassVar, Literal

from jaxtyping import Array, Float
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_rl.math.value import value_loss
from stack_rl.objectives.policy import Advantage, LossAggregation
from stack_rl.objectives.presets import ClippedConfig

__all__ = ["PPOConfig"]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@config
class PPOConfig(ClippedConfig):
    """Proximal policy optimization with a critic that estimates the expected return before each token.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + value_weight max((V - R)^2, (V_clipped - R)^2) / 2

    For A < 0, the first term is at most -dual_clip A. A is the generalized advantage estimate over the sampled tokens
    (`gae_gamma`, `gae_lambda`), whitened; R = A + V_old uses A before whitening. The critic is a head on the policy's
    hidden states, the auxiliary model `critic`: `optimizer.groups: {critic: {rate_factor: 10}}`. Twelve updates per
    batch.

    Attributes:
      name: selects this objective.
      dual_clip: bound of the loss for tokens with A < 0, as a multiple of -A; None does not bound it.
      gae_gamma: discount of later rewards.
      gae_lambda: decay of later errors of the critic, from 0 (the next value) to 1 (the return).
      whiten_advantages: whether advantages are whitened over the sampled tokens of the batch.
      value_weight: weight of the critic's loss, whose gradient also reaches the body.
      value_clip: distance that V may move from V_old towards R before its token stops learning; None does not clip.
      critic_warmup_steps: number of initial steps with advantages of 0, which train the critic but not yet the policy
        on rewards. A new critic predicts 0, so if rewards are far from 0, it would credit tokens by their distance
        from the end of the answer.

    Source: Schulman et al., Proximal policy optimization, 2017 (arXiv:1707.06347), equations 7 and 9; 3 epochs of 4
    minibatches as in its table 5. Departures: (1) the clipped value loss, its weight and whitened advantages, as in
    OpenAI's baselines; (2) the dual clip of Ye et al., 2019 (arXiv:1912.09729); (3) gae_gamma 1, usual for language
    models.
    """

    name: Literal["ppo"] = "ppo"
    advantage: Advantage = "gae"
    loss_aggregation: LossAggregation = "token"
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    gae_gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten_advantages: bool = True
    value_weight: NonNegativeFloat = 0.5
    value_clip: PositiveFloat | None = 0.2
    critic_warmup_steps: NonNegativeInt = 0
    epochs: PositiveInt = 3
    minibatches: PositiveInt = 4

    has_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.updates == 1:
            reason = "A batch has one update, in which V is still V_old"
            self._refuse_unread(("value_clip",), reason, "epochs or objective.minibatches")

    def value_losses(
        self,
        values: Float[Array, "batch seq"],
        old_values: Float[Array, "batch seq"],
        returns: Float[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        return self.value_weight * value_loss(values, old_values, returns, clip=self.value_clip)
