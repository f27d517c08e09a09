"""Learning-rate schedules: warm-up, peak and decay."""

from typing import Annotated, Literal

import optax
from pydantic import Field, NonNegativeInt

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError

__all__ = ["Fraction", "ScheduleConfig"]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@config
class ScheduleConfig:
    """A linear warm-up to the peak learning rate, then a decay to a fraction of the peak at the last step.

    With `decay_fraction` below 1, the rate stays at its peak before the decay: `decay: linear` with
    `decay_fraction: 0.2` is the warmup-stable-decay schedule (WSD) of Hu et al., MiniCPM, 2024 (arXiv:2404.06395).

    Attributes:
      warmup_steps: number of warm-up updates; 0 starts at the peak.
      decay: shape of the decay; "constant" keeps the peak rate.
      decay_fraction: fraction of the steps after the warm-up over which the rate decays, at the end of the run.
      final_fraction: learning rate at the last step divided by the peak learning rate.
    """

    warmup_steps: NonNegativeInt = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_fraction: Fraction = 1.0
    final_fraction: Fraction = 0.1

    def __post_init__(self) -> None:
        if self.decay == "constant" and (unused := changed_fields(self, ("decay_fraction", "final_fraction"))):
            raise ConfigError(
                f"optimizer.schedule.decay is 'constant', so {' and '.join(unused)} would have no effect. Remove it, "
                "or choose decay: cosine or linear."
            )

    def build(self, peak: float, steps: int) -> optax.Schedule:
        """Returns the learning rate as a function of the number of updates done."""
        # A run that is shorter than its warm-up reaches the peak at its last step.
        warmup = min(self.warmup_steps, steps)
        # Optax requires decays of one step or more.
        decay_steps = max(round((steps - warmup) * self.decay_fraction), 1)
        # The warm-up starts at peak / (warmup + 1): a rate of 0 would waste the first update.
        phases = [(optax.linear_schedule(peak / (warmup + 1), peak, warmup), warmup)] if warmup else []
        if self.decay != "constant" and decay_steps < steps - warmup:
            phases.append((optax.constant_schedule(peak), steps - decay_steps))
        ends = [end for _, end in phases]
        return optax.join_schedules([*(schedule for schedule, _ in phases), self._decay(peak, decay_steps)], ends)

    def _decay(self, peak: float, steps: int) -> optax.Schedule:
        if self.decay == "cosine":
            return optax.cosine_decay_schedule(peak, steps, alpha=self.final_fraction)
        if self.decay == "linear":
            return optax.linear_schedule(peak, peak * self.final_fraction, steps)
        return optax.constant_schedule(peak)
