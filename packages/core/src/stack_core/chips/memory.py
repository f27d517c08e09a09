"""Free memory of devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stack_core.chips.machine import available_memory_bytes

if TYPE_CHECKING:
    import jax

__all__ = ["free_bytes"]


def free_bytes(devices: Sequence["jax.Device"]) -> int | None:
    """Returns the bytes still free for arrays on the fullest of some devices of this process.

    Devices without memory of their own, such as CPU devices, share the machine's.

    Returns:
      None when no device reports its memory.
    """
    counted = [device.memory_stats() or {} for device in devices]
    left = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in counted if "bytes_limit" in stats]
    sharing = len(counted) - len(left)
    if sharing and (available_bytes := available_memory_bytes()) is not None:
        left.append(available_bytes // sharing)
    return min(left, default=None)
