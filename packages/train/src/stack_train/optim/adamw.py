"""AdamW."""

from typing import Literal

import optax
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.optim.axes import AxesTree, is_matrix, map_axes
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.schedule import Fraction

__all__ = ["AdamWConfig"]


@config
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, 2019 (arXiv:1711.05101).

    Attributes:
      name: selects this optimizer.
      beta1: decay of the first moments.
      beta2: decay of the second moments.
      epsilon: term added to the root of the second moments.
    """

    name: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        decayed = map_axes(is_matrix, axes)
        return optax.adamw(rate, self.beta1, self.beta2, self.epsilon, weight_decay=self.weight_decay, mask=decayed)
