"""Stochastic gradient descent."""

from typing import Literal

import optax
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.optim.axes import AxesTree, is_matrix, map_axes
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.schedule import Fraction

__all__ = ["SgdConfig"]


@config
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum. Weight decay is decoupled, as in AdamW.

    Attributes:
      name: selects this optimizer.
      learning_rate: peak learning rate.
      momentum: decay of the momentum; 0 keeps no state.
      nesterov: True uses Nesterov momentum.
    """

    name: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = 0.1
    momentum: Fraction = 0.9
    nesterov: bool = False

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, map_axes(is_matrix, axes)),
            optax.scale_by_learning_rate(rate),
        )
