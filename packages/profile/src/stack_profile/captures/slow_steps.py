"""Detection of slow steps whose traces are worth saving, based only on their durations."""

import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Annotated, Final

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = ["AnomalyConfig", "SlowSteps"]

_LEAST_KNOWN: Final = 20  # minimum number of durations before any step is judged
_NORMAL: Final = 1.4826  # standard deviation over median absolute deviation of a normal distribution


@config
class AnomalyConfig:
    """Settings that define anomalously slow steps and limit the number of their traces.

    A step is slow if it takes more than `max(ratio * median, median + deviations * spread)`, both over the last
    `history_steps` steps. The spread is the standard deviation estimated from the median absolute deviation, which is
    robust to slow steps.

    Attributes:
      ratio: minimum ratio of a slow step's duration to the median, even if the spread is tiny.
      deviations: number of spreads above the median; at 8, a step of 3 medians is slow if the spread is under a quarter
        of the median.
      history_steps: number of recent steps in the median and spread; also the maximum number of steps for which a
        lasting change counts as slow.
      warmup_steps: number of first steps that are ignored, while caches and pipelines fill.
      captures: maximum number of saved traces.
      cooldown_steps: number of steps after a saved trace before the next one.
    """

    ratio: Annotated[float, Field(gt=1)] = 2.0
    deviations: Annotated[float, Field(gt=0)] = 8.0
    history_steps: Annotated[int, Field(ge=_LEAST_KNOWN)] = 128
    warmup_steps: NonNegativeInt = 10
    captures: PositiveInt = 3
    cooldown_steps: NonNegativeInt = 100


class SlowSteps:
    """Detector that judges one step after another.

    Attributes:
      captures_left: number of slow steps it may still report.
    """

    def __init__(self, settings: AnomalyConfig) -> None:
        self._settings = settings
        self._recent_s: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=settings.history_steps))
        self._unknown, self._cooling = settings.warmup_steps, 0
        self.captures_left = settings.captures

    @property
    def is_armed(self) -> bool:
        """True if the next step can be judged slow."""
        known = any(len(recent_s) >= _LEAST_KNOWN for recent_s in self._recent_s.values())
        return self.captures_left > 0 and not self._cooling and known

    def exceeded_s(self, duration_s: float, *, kind: Hashable = None, recorded: bool = True) -> float | None:
        """Returns the threshold that a step exceeds if its trace should be saved, otherwise None.

        The step also joins the history for later steps.

        Args:
          duration_s: duration of the step.
          kind: kind of the step, which is only compared with steps of the same kind.
          recorded: True if a trace of the step exists; without one, it is not judged.
        """
        if self._unknown:
            self._unknown -= 1
            return None
        # Judged before it joins the history, which it would distort.
        recent_s = self._recent_s[kind]
        threshold_s = self._threshold_s(recent_s) if recorded and self.is_armed else None
        self._cooling = max(self._cooling - 1, 0)
        recent_s.append(duration_s)
        if threshold_s is None or duration_s <= threshold_s:
            return None
        self.captures_left -= 1
        self._cooling = self._settings.cooldown_steps
        return threshold_s

    def _threshold_s(self, recent_s: Iterable[float]) -> float | None:
        """Returns the duration above which a step is slow; None until enough durations are known."""
        known_s = list(recent_s)
        if len(known_s) < _LEAST_KNOWN:
            return None
        median_s = statistics.median(known_s)
        spread_s = _NORMAL * statistics.median(abs(each_s - median_s) for each_s in known_s)
        return max(self._settings.ratio * median_s, median_s + self._settings.deviations * spread_s)
