"""Schedule-free AdamW."""

from typing import Any, Literal

import jax
import optax
from optax import contrib
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.optim.axes import AxesTree, is_matrix, map_axes
from stack_train.optim.offload import on_device
from stack_train.optim.optimizer import OptimizerConfig, states_of
from stack_train.optim.schedule import Fraction, ScheduleConfig

__all__ = ["ScheduleFreeConfig"]


@config
class ScheduleFreeConfig(OptimizerConfig):
    """AdamW with weight averaging instead of learning-rate decay.

    Gradients are computed at an interpolation between the fast weights z and their average x:
    y = (1 - beta1) z + beta1 x. The average is evaluated and exported. Source: Defazio et al., The Road Less Scheduled,
    2024 (arXiv:2405.15682).

    Attributes:
      name: selects this optimizer.
      learning_rate: learning rate after the warm-up.
      schedule: warm-up of the learning rate; `decay` must be "constant".
      beta1: weight of the average in the point at which gradients are computed, above 0.
      beta2: decay of the second moments.
      epsilon: term added to the root of the second moments.
    """

    name: Literal["schedule_free"] = "schedule_free"
    learning_rate: PositiveFloat = 2.5e-3
    schedule: ScheduleConfig = ScheduleConfig(decay="constant")
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8

    def __post_init__(self) -> None:
        if self.ema_decay is not None:
            raise ConfigError("optimizer.ema_decay: schedule_free averages the weights already. Leave it out.")
        if self.outer is not None:
            raise ConfigError("optimizer.outer: schedule_free averages the weights of its own steps. Leave it out.")
        if self.qk_clip is not None:
            raise ConfigError(
                f"optimizer.qk_clip is {self.qk_clip:g}: schedule_free evaluates an average that scaled weights would "
                "not change. Leave it out, or choose another optimizer."
            )
        if self.schedule.decay != "constant":
            raise ConfigError(
                f"optimizer.schedule.decay is {self.schedule.decay!r}; schedule_free takes 'constant', with or without "
                "a warm-up."
            )
        if self.beta1 == 0:
            raise ConfigError("optimizer.beta1 is 0; schedule_free requires a value above 0, such as 0.9.")

    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        # Adam's second moments only: the interpolation by beta1 replaces the first moments (Defazio et al., 2024).
        fast = optax.chain(
            optax.scale_by_rms(self.beta2, self.epsilon, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(self.weight_decay, map_axes(is_matrix, axes)),
            optax.scale_by_learning_rate(rate),
        )
        return contrib.schedule_free(fast, rate, self.beta1)

    @property
    def averages(self) -> bool:
        return True

    def evaluation_params(self, params: Any, opt_state: Any) -> Any:
        def average(fast: Any, param: Any) -> Any:
            # Each group has its own state, in which parameters of other groups are masked.
            if _is_masked(fast):
                return param
            # Solves y = (1 - beta1) z + beta1 x for x. `fast` is float32, so the result is rounded only once.
            return ((param - (1 - self.beta1) * fast) / self.beta1).astype(param.dtype)

        for state in states_of(opt_state, contrib.ScheduleFreeState):
            params = jax.tree.map(average, on_device(state.z), params, is_leaf=_is_masked)
        return params


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
