"""Limit of the size of traces, which must fit the memory of this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stack_core.chips.machine import available_memory_bytes
from stack_core.report.fields import number
from stack_profile.errors import TraceError

__all__ = ["check_size"]

_MEMORY_PER_BYTE: Final = 8  # traces of CPUs of 0.3 and 1 GB took 5.7
_ALWAYS_BYTES: Final = 1 << 26  # smaller traces are read on any machine


def check_size(files: Sequence[Path], free_bytes: int | None = None) -> None:
    """Refuses a trace whose events may not fit the free memory.

    Args:
      files: files of the trace.
      free_bytes: memory that reading may take, by default the free memory of this machine.

    Raises:
      TraceError: the trace is too large.
    """
    sizes = {file: file.stat().st_size for file in files if file.exists()}  # reading reports missing files
    total_bytes = sum(sizes.values())
    if total_bytes <= _ALWAYS_BYTES:
        return
    free_bytes = available_memory_bytes() if free_bytes is None else free_bytes
    needed_bytes = _MEMORY_PER_BYTE * total_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    largest = max(sizes, key=lambda file: sizes[file])
    raise TraceError(
        f"The trace has {number('_bytes', total_bytes)} ({str(largest)!r}). Reading it may take "
        f"{number('_bytes', needed_bytes)} of memory, and {number('_bytes', free_bytes)} are free. Capture a shorter "
        "time (`stack profile run --duration-s 5 ...`, `profile: {steps: 5}`) or fewer events of the host "
        "(`--host-tracer-level 1`), or read it on a machine with more memory."
    )
