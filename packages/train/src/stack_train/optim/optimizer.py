"""Base class of optimizer configs: schedule, clipping, parameter groups, spike skipping and weight averaging."""

import abc
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric
from stack_train.optim.averaging import AveragedState, average_weights
from stack_train.optim.axes import AxesTree
from stack_train.optim.groups import REST, GroupConfig, check_groups, group_names, group_of
from stack_train.optim.moments import MomentDtype, compress_moments
from stack_train.optim.offload import OffloadedState, keep_on_host, on_device
from stack_train.optim.outer import OuterConfig, take_outer_steps
from stack_train.optim.schedule import ScheduleConfig
from stack_train.optim.spikes import SkippedState, SpikeConfig, skip_spikes
from stack_train.optim.weight_factors import scale_weights

__all__ = ["OptimizerConfig", "states_of"]


@config
class OptimizerConfig(abc.ABC):
    """Settings shared by all optimizers. A subclass adds the field `name`, further fields and `transformation`.

    Attributes:
      learning_rate: peak learning rate of the schedule.
      schedule: learning rate over the run, relative to the peak.
      weight_decay: decoupled weight decay: each update subtracts learning rate * weight_decay * matrix from every
        matrix. Norm scales and biases are not decayed.
      clip_norm: maximum global norm of the gradients; larger gradients are scaled down. None disables clipping.
      skip_spikes: settings for skipping updates whose gradient norm is a spike or not finite; None applies every
        update.
      ema_decay: decay of a moving average of the weights, which is evaluated and exported instead of the weights.
        None keeps no average.
      moments: dtype in which the moments of matrices are stored between updates: float32 (4 bytes a number), bfloat16
        (2) or 8bit (1, with a float32 scale a row). Updates are computed in float32, and rounding is stochastic.
      offload: True keeps the state in the host's memory between updates, for devices whose own memory it does not fit.
      outer: settings of outer steps over several updates (DiLoCo); None takes none.
      qk_clip: largest attention logit of a head, such as 100. After an update whose forward pass exceeded it, the
        head's query and key projections are scaled down (`stack_train.step.qk_clip`). None bounds none.
      groups: settings of parameter groups, by a pattern of parameter paths. The first matching pattern applies.
    """

    learning_rate: PositiveFloat = 3e-4
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0
    skip_spikes: SpikeConfig | None = None
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    moments: MomentDtype = "float32"
    offload: bool = False
    outer: OuterConfig | None = None
    qk_clip: PositiveFloat | None = None
    groups: Mapping[str, GroupConfig] = Field(default_factory=dict)

    @abc.abstractmethod
    def transformation(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        """Returns the update rule without clipping, groups, outer steps, spike skipping and averaging.

        Args:
          rate: learning rate as a function of the update count; the transformation must apply this factor.
          axes: logical axes of every parameter. With groups, `axes` still covers all parameters, while the trees passed
            to the transformation have `optax.MaskedNode` for parameters of other groups.
        """

    def learning_rate_schedule(self, steps: int) -> optax.Schedule:
        return self.schedule.build(self.learning_rate, steps)

    def check(self, paths: Sequence[str]) -> None:
        """Checks the groups against the paths of a model's parameters.

        Raises:
          ConfigError: a group's pattern is malformed, or matches no parameter.
        """
        check_groups(self.groups, paths)

    def freezes(self, path: str) -> bool:
        """Returns whether a parameter is in a frozen group."""
        group = group_of(self.groups, path)
        return group is not None and self.groups[group].frozen

    def build(self, steps: int, axes: AxesTree) -> optax.GradientTransformation:
        """Returns the complete optimizer of the trainable parameters for a run of `steps` updates.

        Raises:
          ConfigError: `outer` has several replicas, whose outer steps are a part of the training step (`make_step`).
        """
        if self.outer is not None and self.outer.replicas > 1:
            raise ConfigError(
                f"optimizer.outer.replicas is {self.outer.replicas}, and an optimizer alone has no replicas: train by "
                "make_step, or set optimizer.outer.replicas=1."
            )
        update = self._grouped(self.learning_rate_schedule(steps), axes)
        if self.moments != "float32":
            update = compress_moments(update, self.moments, axes)
        if self.qk_clip is not None:
            update = scale_weights(update)
        # Outside of the groups: the global norm is the norm of all groups together.
        if self.clip_norm is not None:
            update = optax.chain(optax.clip_by_global_norm(self.clip_norm), update)
        if self.outer is not None:
            update = take_outer_steps(update, self.outer)
        if self.ema_decay is not None:
            update = average_weights(update, self.ema_decay)
        # Spikes are detected on the gradients before clipping, and a skipped update leaves the average unchanged.
        if self.skip_spikes is not None:
            update = skip_spikes(update, self.skip_spikes)
        return keep_on_host(update) if self.offload else update

    @property
    def averages(self) -> bool:
        """Returns True if an average of the trained parameters is evaluated instead of the parameters."""
        return self.ema_decay is not None

    def evaluation_params(self, params: Any, opt_state: Any) -> Any:
        """Returns the parameters to evaluate and export: their average if the optimizer keeps one."""
        for state in states_of(opt_state, AveragedState):
            params = jax.tree.map(lambda average, param: average.astype(param.dtype), on_device(state.average), params)
        return params

    def metrics(self, opt_state: Any, step: jax.Array, steps: int) -> dict[str, Metric]:
        """Returns the metrics of an update.

        Args:
          opt_state: the optimizer's state after the update.
          step: number of updates before this one, including skipped updates.
          steps: total number of updates of the run.
        """
        schedule = self.learning_rate_schedule(steps)
        opt_state = opt_state.on_host if isinstance(opt_state, OffloadedState) else opt_state
        if not isinstance(opt_state, SkippedState):
            return {"learning_rate": Metric.mean(jnp.asarray(schedule(step), jnp.float32))}
        # A skipped update does not change the inner state, so the schedule's count does not advance either.
        skipped_before = opt_state.skipped_in_all - opt_state.skipped
        rate = jnp.asarray(schedule(step - skipped_before), jnp.float32)
        return {"learning_rate": Metric.mean(rate), "skipped": Metric.sum(opt_state.skipped.astype(jnp.float32))}

    def _grouped(self, rate: optax.Schedule, axes: AxesTree) -> optax.GradientTransformation:
        if not self.groups:
            return self.transformation(rate, axes)
        transformations: dict[Hashable, optax.GradientTransformation] = {REST: self.transformation(rate, axes)}
        for place, group in enumerate(self.groups.values()):
            transformations[str(place)] = self._with(group).transformation(group.scale(rate), axes)
        return optax.partition(transformations, group_names(self.groups, axes))

    def _with(self, group: GroupConfig) -> "OptimizerConfig":
        decay = self.weight_decay if group.weight_decay is None else group.weight_decay
        return dataclasses.replace(self, weight_decay=decay)


def states_of(opt_state: Any, kind: type) -> list[Any]:
    """Returns all states of type `kind` within an optimizer's state."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
