"""Lion."""

from typing import Literal

import optax
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.optim.axes import AxesTree, is_matrix, map_axes
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.schedule import Fraction

__all__ = ["LionConfig"]


@config
class LionConfig(OptimizerConfig):
    """Lion: updates by the sign of a momentum, with half of Adam's optimizer memory.

    Learning rates are 3 to 10 times smaller than for Adam, and weight decay is larger by the same factor.
    Source: Chen et al., 2023 (arXiv:2302.06675).

    Attributes:
      name: selects this optimizer.
      learning_rate: peak learning rate.
      beta1: weight of the momentum in the update, whose remainder is the gradient.
      beta2: decay of the momentum.
    """

    name: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        decayed = map_axes(is_matrix, axes)
        return optax.lion(rate, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=decayed)
