"""The Python heap of a process at its peak, which a capture with `python_heap` tracked by memray."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from stack_profile.traces.instructions import Frame

__all__ = ["HeapPeak", "HeapStack", "read_python_heap"]


@dataclass(frozen=True)
class HeapStack:
    """Memory in use at the peak that one Python stack allocated.

    Attributes:
      size_bytes: size of the memory.
      allocations: number of allocations.
      frames: the stack, innermost frame first; empty if a thread without Python allocated it.
    """

    size_bytes: int
    allocations: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class HeapPeak:
    """Memory in use at the peak, of all allocations since the capture began.

    Attributes:
      peak_bytes: total size.
      allocations: number of allocations during the capture.
      stacks: stacks that allocated it, the largest first; of very many, the smallest are missing.
    """

    peak_bytes: int
    allocations: int
    stacks: tuple[HeapStack, ...]


def read_python_heap(file: Path, damage: list[str]) -> HeapPeak | None:
    """Reads the heap of a process; None if it was not tracked.

    Args:
      file: file of the heap, which may be missing.
      damage: receives the reason why a file cannot be read.
    """
    try:
        content = json.loads(gzip.decompress(file.read_bytes()))
        frames = [Frame(*frame) for frame in content["frames"]]
        stacks = (
            HeapStack(size, count, tuple(frames[each] for each in stack)) for size, count, stack in content["rows"]
        )
        return HeapPeak(content["peak_bytes"], content["allocations"], tuple(stacks))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        damage.append(f"{file.name}, the Python heap, cannot be read: {error!r}")
        return None
