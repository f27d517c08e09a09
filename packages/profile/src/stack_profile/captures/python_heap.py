"""Memory that Python code allocates, tracked by memray while a capture runs.

memray sees the calls of malloc and mmap of all threads with their Python stacks. It slows code that allocates often.
"""

import contextlib
import gzip
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from stack_core.abi.installing import install_command
from stack_profile.errors import CaptureError

__all__ = ["PythonHeap", "crashes", "load_memray"]

_MOST_STACKS: Final = 20_000
# Up to this version, ending a tracker ends Python 3.12 and 3.13 with a segmentation fault (memray's issue 999).
_LAST_UNSAFE: Final = (1, 20, 0)


def load_memray() -> Any:
    """Imports memray.

    Raises:
      CaptureError: memray is not installed, or its version crashes this Python.
    """
    try:
        memray = importlib.import_module("memray")
    except ImportError as error:
        command = install_command("stack-profile[memray]")
        raise CaptureError(f"The Python heap needs memray, which is not installed: {command}") from error
    if crashes(sys.version_info[:2], memray.__version__):
        raise CaptureError(
            f"memray {memray.__version__} crashes Python 3.12 and 3.13 when it stops tracking. Use a later memray or "
            "Python 3.11, or capture without python_heap."
        )
    return memray


def crashes(python: tuple[int, ...], memray: str) -> bool:
    """Returns whether a version of memray crashes a version of Python when a tracker ends."""
    return python >= (3, 12) and tuple(map(int, re.findall(r"\d+", memray)[:3])) <= _LAST_UNSAFE


class PythonHeap:
    """Tracking of this process's allocations from `start` to `stop`; a process has one at a time."""

    def __init__(self) -> None:
        """Prepares to track.

        Raises:
          CaptureError: memray is not installed.
        """
        self._memray = load_memray()
        self._tracker: Any = None
        self._file: Path | None = None

    def start(self, file: Path) -> None:
        """Starts to track into a temporary file, which `close` deletes.

        Raises:
          CaptureError: memray tracks this process already, or cannot write the file.
        """
        memray, self._file = self._memray, file
        destination = memray.FileDestination(str(file), overwrite=True)
        try:
            tracker = memray.Tracker(destination=destination, file_format=memray.FileFormat.AGGREGATED_ALLOCATIONS)
            tracker.__enter__()
        except (RuntimeError, OSError) as error:
            self.close()
            raise CaptureError(f"memray cannot track the Python heap: {error}. Capture without python_heap.") from error
        self._tracker = tracker

    def stop(self) -> None:
        """Ends tracking; later calls do nothing."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.__exit__(None, None, None)

    def content(self) -> bytes:
        """Returns the memory at its peak by Python stack as compressed JSON, see `stack_profile.traces.python_heap`.

        Call it between `stop` and `close`.
        """
        assert self._file is not None, "the heap was tracked"
        with self._memray.FileReader(str(self._file)) as reader:
            found = list(reader.get_high_watermark_allocation_records(merge_threads=True))
            allocations = reader.metadata.total_allocations
        found.sort(key=lambda record: -record.size)
        frames: dict[tuple[str, int, str], int] = {}
        rows = []
        for record in found[:_MOST_STACKS]:
            stack = [(file, line, function) for function, file, line in record.stack_trace()]
            places = [frames.setdefault(frame, len(frames)) for frame in stack]
            rows.append([record.size, record.n_allocations, places])
        content = {
            "peak_bytes": sum(record.size for record in found),
            "allocations": allocations,
            "frames": list(frames),
            "rows": rows,
        }
        return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 3)

    def close(self) -> None:
        """Deletes the temporary file; later calls do nothing."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # its directory was deleted meanwhile, or made read-only
                self._file.unlink()
