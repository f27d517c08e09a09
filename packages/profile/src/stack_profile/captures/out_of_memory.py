"""Stores the state of the devices' memory when a step fails without a running capture."""

import json
import warnings
from datetime import UTC, datetime
from pathlib import Path

from stack_profile.captures.capture import capture_file, environment
from stack_profile.captures.memory_snapshot import note_snapshot, take_snapshot
from stack_profile.captures.processes import LIVE_SUFFIX, stem
from stack_profile.captures.ring import replace_file
from stack_profile.errors import CaptureError, CaptureWarning
from stack_profile.traces.wire import encode_bytes

__all__ = ["save_out_of_memory"]


def save_out_of_memory(out: Path, error: BaseException | None) -> Path | None:
    """Writes a capture without events, for `stack profile out_of_memory` and `memory`, if a device is out of memory.

    Standard error gets the command that shows the capture, or a warning if it cannot be written; the error of the
    program matters more.

    Args:
      out: directory of the captures.
      error: error of the program.

    Returns:
      The trace's file; None for other errors, and if it cannot be written.
    """
    snapshot = take_snapshot(error)
    if snapshot is None:
        return None
    started = datetime.now(UTC)
    about = {"started_at": started.isoformat(), **environment(), "out_of_memory": snapshot.about}
    try:
        path = capture_file(out, f"out_of_memory_{started.strftime('%Y_%m_%d_%H_%M_%S_%f')}", None)
        for name, proto in snapshot.programs:
            replace_file(path.with_name(f"{stem(path)}.{name}.hlo.pb"), proto)
        replace_file(path.with_name(f"{stem(path)}{LIVE_SUFFIX}"), snapshot.live)
        replace_file(path.with_name(f"{stem(path)}.capture.json"), json.dumps(about, indent=2).encode())
        # An XSpace with one plane, a host without events: readers look for this file.
        replace_file(path, encode_bytes(1, encode_bytes(2, b"/host:CPU")))
    except (CaptureError, OSError) as problem:
        warnings.warn(f"The state of the full memory is lost: {problem}", CaptureWarning, stacklevel=2)
        return None
    note_snapshot(path)
    return path
