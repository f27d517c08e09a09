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
    """Adafactor, which factors the second moments into row and column means.

    Source: Shazeer and Stern, 2018 (arXiv:1804.04235). Departures: (1) the learning rate multiplies weight decay, as in
    AdamW; (2) updates are clipped and scaled by a root mean square over all layers that are stacked in one array.

    Attributes:
      name: selects this optimizer.
      learning_rate: peak learning rate; a relative step size if `relative_updates`.
      smallest_factored: smallest second-largest axis at which an array's second moments are factored. Smaller arrays
        keep unfactored second moments.
      decay_exponent: exponent of the second moments' decay, 1 - n ** -decay_exponent after n updates.
      clip_update: maximum root mean square of an update, before the learning rate is applied.
      relative_updates: True multiplies each update by the root mean square of its parameter.
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
            # After the clipping, which bounds the update of the loss and not the decay.
            optax.add_decayed_weights(self.weight_decay, map_axes(is_matrix, axes)),
            optax.scale_by_learning_rate(rate),
        )
