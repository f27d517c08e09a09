"""When a step is so slow that its trace is worth keeping: a function of the durations alone."""

import statistics
from collections import deque
from typing import Annotated, Final

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = ["AnomalyConfig", "SlowSteps"]

_LEAST_KNOWN: Final = 20  # durations, before any is judged
_NORMAL: Final = 1.4826  # of a normal distribution, the standard deviation over the median absolute deviation


@config
class AnomalyConfig:
    """Which steps are anomalously slow, and how many traces of them to keep.

    A step is slow if it takes more than `max(ratio * median, median + deviations * spread)`, both of the last
    `history_steps` steps; the spread is a standard deviation as the median absolute deviation estimates it, which slow
    steps hardly change.

    Attributes:
      ratio: to the median, from which on a step may be slow however even the others are.
      deviations: spreads above the median; with 8, a step of 3 medians is slow where the spread is under a quarter.
      history_steps: steps that are compared with; also how long a lasting change goes on to be one, at most.
      warmup_steps: steps that are neither judged nor compared with, for caches and pipelines to fill.
      captures: traces that are kept at most.
      cooldown_steps: after a trace was kept, steps until the next may be.
    """

    ratio: Annotated[float, Field(gt=1)] = 2.0
    deviations: Annotated[float, Field(gt=0)] = 8.0
    history_steps: Annotated[int, Field(ge=_LEAST_KNOWN)] = 128
    warmup_steps: NonNegativeInt = 10
    captures: PositiveInt = 3
    cooldown_steps: NonNegativeInt = 100


class SlowSteps:
    """Judges steps one after the other.

    Attributes:
      captures_left: how many more it may find.
    """

    def __init__(self, settings: AnomalyConfig) -> None:
        self._settings = settings
        self._recent_s: deque[float] = deque(maxlen=settings.history_steps)
        self._unknown, self._cooling = settings.warmup_steps, 0
        self.captures_left = settings.captures

    @property
    def is_armed(self) -> bool:
        """Whether the next step may be found slow."""
        return self.captures_left > 0 and not self._cooling and len(self._recent_s) >= _LEAST_KNOWN

    @property
    def threshold_s(self) -> float | None:
        """Above it a step is slow; None while too few are known."""
        if len(self._recent_s) < _LEAST_KNOWN:
            return None
        median_s = statistics.median(self._recent_s)
        spread_s = _NORMAL * statistics.median(abs(each_s - median_s) for each_s in self._recent_s)
        return max(self._settings.ratio * median_s, median_s + self._settings.deviations * spread_s)

    def exceeded_s(self, duration_s: float) -> float | None:
        """The threshold that a step of that duration exceeds, if its trace is to be kept, else None.

        The following steps are compared with it, too.
        """
        if self._unknown:
            self._unknown -= 1
            return None
        threshold_s = self.threshold_s if self.is_armed else None
        self._cooling = max(self._cooling - 1, 0)
        self._recent_s.append(duration_s)
        if threshold_s is None or duration_s <= threshold_s:
            return None
        self.captures_left -= 1
        self._cooling = self._settings.cooldown_steps
        return threshold_s
