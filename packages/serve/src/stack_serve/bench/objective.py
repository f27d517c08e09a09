"""Service level objective: latency limits that a request must meet to count towards goodput."""

from dataclasses import dataclass

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.call import Call

__all__ = ["Objective"]

_LIMITS = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True)
class Objective:
    """Upper limits on the latencies of a request.

    Attributes:
      limits: limits in milliseconds, keyed by "ttft_ms", "tpot_ms" and "e2e_ms".
    """

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Parses "ttft_ms:200,tpot_ms:50".

        Raises:
          BenchmarkError: a limit is unknown, repeated or not a positive number.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if name not in _LIMITS or name in limits or not limit > 0:
                raise BenchmarkError(
                    f"The objective {text!r} contains {part!r}; expected {', '.join(_LIMITS)}, each at most "
                    "once with a positive number, as in ttft_ms:200,tpot_ms:50."
                )
            limits[name] = limit
        return cls(limits)

    def holds(self, call: Call) -> bool:
        """Returns whether a request succeeded within all limits. "tpot_ms" is ignored for single-token answers."""
        if call.failure is not None:
            return False
        times_s = {"ttft_ms": call.ttft_s, "tpot_ms": call.tpot_s or 0.0, "e2e_ms": call.e2e_s}
        return all(1e3 * times_s[name] <= limit for name, limit in self.limits.items())
