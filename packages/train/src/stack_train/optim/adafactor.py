"""Adafactor."""

from typing import Literal

import optax
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.optim.axes import AxesTree, is_matrix, map_axes
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.schedule import Fraction

__all__ = ["AdafactorConfig"]


@config
class AdafactorConfig(OptimizerConfig):
    """Second moments as the outer product of their row and column means.

    Source: Shazeer and Stern, 2018 (arXiv:1804.04235). Departures: (1) the learning rate multiplies weight decay, as in
    AdamW; (2) the root mean squares by which updates are clipped and scaled are those of stacked layers together.

    Attributes:
      smallest_factored: arrays whose second largest axis is shorter keep all their second moments.
      decay_exponent: the second moments' decay after n updates is 1 - n ** -decay_exponent.
      clip_update: the largest root mean square of an update, before the learning rate.
      relative_updates: multiplies updates with the root mean square of the parameter, so that `learning_rate` is a
        relative size of steps.
    """

    name: Literal["adafactor"] = "adafactor"
    learning_rate: PositiveFloat = 1e-2
    smallest_factored: PositiveInt = 128
    decay_exponent: Fraction = 0.8
    clip_update: PositiveFloat = 1.0
    relative_updates: bool = True

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(True, self.decay_exponent, min_dim_size_to_factor=self.smallest_factored),
            optax.clip_by_block_rms(self.clip_update),
            optax.scale_by_param_block_rms() if self.relative_updates else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, map_axes(is_matrix, axes)),
            optax.scale_by_learning_rate(rate),
        )
