"""What else a machine computes while something is measured on it."""

import os
import time
from pathlib import Path

__all__ = ["Neighbours"]

_STAT = Path("/proc/stat")


class Neighbours:
    """Counts the processors that other programs use from its making on; unknown where there is no `/proc`."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._theirs_s = _others_s()

    def cpus(self) -> float | None:
        """The average number of processors that other programs used, or None without `/proc`."""
        now = _others_s()
        if now is None or self._theirs_s is None:
            return None
        return max(now - self._theirs_s, 0.0) / max(time.monotonic() - self._since_s, 1e-3)


def _others_s() -> float | None:
    """Processor seconds of all programs but this one and its children, since the machine started."""
    try:
        user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(
            int, _STAT.read_text().split("\n")[0].split()[1:]
        )
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
