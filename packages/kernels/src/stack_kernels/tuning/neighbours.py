"""CPU use of other programs during a measurement."""

import os
import time
from pathlib import Path

__all__ = ["Neighbours"]

_STAT = Path("/proc/stat")


class Neighbours:
    """Measures the CPU time of other programs since its construction; unknown on systems without `/proc`."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._theirs_s = _other_programs_s()

    def cpus(self) -> float | None:
        """Returns the average number of CPUs that other programs used, or None without `/proc`."""
        now = _other_programs_s()
        if now is None or self._theirs_s is None:
            return None
        return max(now - self._theirs_s, 0.0) / max(time.monotonic() - self._since_s, 1e-3)


def _other_programs_s() -> float | None:
    """Returns the CPU seconds of all programs since boot, except this one and its children."""
    try:
        # The two unnamed numbers are idle time; guests, at the end, are counted in the first two.
        user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(
            int, _STAT.read_text().split("\n")[0].split()[1:]
        )
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + interrupts + soft_interrupts
    # The user and system time of this process and of children that have ended.
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
