"""State of the devices' memory when an allocation fails: live arrays, allocators, and the largest compiled programs."""

import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stack_profile.errors import CaptureWarning
from stack_profile.traces.hlo import hlo_proto, program_key

__all__ = ["MemorySnapshot", "exhausted_message", "note_snapshot", "take_snapshot"]

_PROGRAMS: Final = 4  # number of stored programs, the largest first
_LONGEST: Final = 4_000  # characters of the message; an allocator lists its chunks


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory of this process's devices.

    Attributes:
      about: message of the error, and statistics of each device's allocator, empty for a device that has none.
      live: live arrays with the Python stacks that made them, a profile of pprof compressed by gzip.
      programs: names, such as `jit_step(7)`, and HloProtos with their buffers.
    """

    about: dict[str, Any]
    live: bytes
    programs: tuple[tuple[str, bytes], ...]


def exhausted_message(error: BaseException | None) -> str:
    """Returns the message by which JAX reported that a device is out of memory, or "" for other errors.

    Args:
      error: the error, which may have another one as its cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def take_snapshot(error: BaseException | None) -> MemorySnapshot | None:
    """Describes the memory after an error, whose frames still hold the arrays of the failed step.

    Returns:
      The snapshot; None for other errors, and with a warning if the devices cannot be described.
    """
    message = exhausted_message(error)
    if not message:
        return None
    try:
        return _snapshot(message)
    except Exception as problem:  # A full device may fail in any way, and the program's own error matters more.
        warnings.warn(f"The state of the full memory is lost: {problem!r}", CaptureWarning, stacklevel=3)
        return None


def note_snapshot(path: Path) -> None:
    """Prints the command that shows a stored snapshot to standard error.

    Args:
      path: the trace's file.
    """
    folder = shlex.quote(str(path.parent))
    message = f"stack: a device was out of memory: stack profile out_of_memory {folder}"
    print(message, file=sys.stderr)  # noqa: T201, beside the program's error


def _snapshot(message: str) -> MemorySnapshot:
    import jax

    devices = {f"{each.platform.upper()}:{each.id}": each.memory_stats() or {} for each in jax.local_devices()}
    client = jax.devices()[0].client
    # Not every client of PJRT lists its programs.
    programs = client.live_executables() if hasattr(client, "live_executables") else []
    largest = sorted(((_needed_bytes(each), place) for place, each in enumerate(programs)), reverse=True)[:_PROGRAMS]
    return MemorySnapshot(
        about={"message": message[:_LONGEST], "devices": devices},
        live=jax.profiler.device_memory_profile(),
        programs=tuple(_program(programs[place]) for _, place in largest),
    )


def _needed_bytes(executable: Any) -> int:
    stats = executable.get_compiled_memory_stats()
    argument_bytes = stats.argument_size_in_bytes - stats.alias_size_in_bytes
    return argument_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes


def _program(executable: Any) -> tuple[str, bytes]:
    module = executable.hlo_modules()[0]
    # Versions of jaxlib without this attribute do not provide the buffers.
    buffers = getattr(executable.get_compiled_memory_stats(), "serialized_buffer_assignment_proto", b"")
    proto = hlo_proto(module.as_serialized_hlo_module_proto(), buffers)
    return f"{module.name}({program_key(proto)})", proto
