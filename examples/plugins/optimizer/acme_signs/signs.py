"""`optimizer: {name: signs}`: sign descent; schedule, clipping and groups come from `OptimizerConfig`."""

from typing import Literal

import optax

from stack_core.abi.config import config
from stack_train.optim import OptimizerConfig


@config
class Signs(OptimizerConfig):
    """Settings of sign descent. Source: Bernstein et al., 2018 (arXiv:1802.04434)."""

    name: Literal["signs"] = "signs"
    learning_rate: float = 1e-3

    def transformation(self, rate, axes):
        return optax.sign_sgd(rate)
