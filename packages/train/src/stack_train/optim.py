"""Optimizers: configs that build Optax transformations."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import optax
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from stack_core.config import config

__all__ = ["AdamWConfig", "ScheduleConfig"]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@config
class ScheduleConfig:
    """A linear warm-up to the peak learning rate, then a decay to a fraction of it at the last step."""

    warmup_steps: NonNegativeInt = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_fraction: Fraction = 0.1

    def build(self, peak: float, steps: int) -> optax.Schedule:
        """Returns the learning rate as a function of the number of updates done."""
        warmup = min(self.warmup_steps, steps)
        decay_steps = max(steps - warmup, 1)
        if self.decay == "cosine":
            after = optax.cosine_decay_schedule(peak, decay_steps, alpha=self.final_fraction)
        elif self.decay == "linear":
            after = optax.linear_schedule(peak, peak * self.final_fraction, decay_steps)
        else:
            after = optax.constant_schedule(peak)
        before = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
        return optax.join_schedules([before, after], [warmup]) if warmup else after


@config
class AdamWConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) after clipping by the global norm.

    Weight decay acts on matrices only: norms' scales and biases are left alone.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    schedule: ScheduleConfig = ScheduleConfig()
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0

    def learning_rate_schedule(self, steps: int) -> optax.Schedule:
        return self.schedule.build(self.learning_rate, steps)

    def build(self, steps: int, decayed: Callable[[Any], Any]) -> optax.GradientTransformation:
        """Returns the transformation for a run of `steps` updates.

        Args:
          decayed: maps the parameters to a tree of bools: whether weight decay acts on each.
        """
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity()
        adamw = optax.adamw(
            self.learning_rate_schedule(steps),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=decayed,
        )
        return optax.chain(clip, adamw)


def decayed_by_axes(logical_axes: Any) -> Any:
    """True where a parameter is a matrix: it has two axes or more beside the stacked layers.

    Args:
      logical_axes: tree of tuples of logical axis names, in the structure of the parameters.
    """
    return jax.tree.map(
        lambda axes: sum(axis != "layers" for axis in axes) >= 2,
        logical_axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
