"""Memory of the devices when an allocation failed: live arrays by the lines that made them, and the programs."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from stack_core.report.fields import number
from stack_core.report.plots import bars
from stack_profile.analyses.memory import total_bytes_of
from stack_profile.answer import Answer
from stack_profile.traces.host_stacks import line_of
from stack_profile.traces.live_arrays import LiveStack
from stack_profile.traces.trace import Trace

__all__ = ["LiveGrouping", "LiveRow", "out_of_memory"]

LiveGrouping = Literal["line", "function", "device"]


@dataclass(frozen=True)
class LiveRow:
    """Arrays that were live when a device was out of memory.

    Attributes:
      name: Python line or function that made the arrays, or their device; "" if unknown.
      kind: "array", or "program" for the code of compiled programs.
      size_bytes: size of the arrays.
      size_live_share: `size_bytes` as a share of `live_bytes`.
      arrays: number of arrays.
    """

    name: str
    kind: str
    size_bytes: int
    size_live_share: float | None
    arrays: int


def out_of_memory(trace: Trace, *, by: LiveGrouping = "line") -> Answer[LiveRow]:
    """Show what filled the devices when an allocation failed.

    Args:
      by: grouping of the live arrays: line or function that made them, or device.
    """
    # CPUs do not count the code of programs.
    stacks = [stack for live in trace.live if live is not None for stack in live.stacks if stack.size_bytes]
    failures = [about["out_of_memory"] for about in trace.abouts if about.get("out_of_memory")]
    live_bytes = sum(stack.size_bytes for stack in stacks)
    groups: dict[tuple[str, str], list[LiveStack]] = collections.defaultdict(list)
    for stack in stacks:
        groups[_name(stack, by), _KINDS.get(stack.kind, stack.kind)].append(stack)
    rows = [_row(*key, found, live_bytes) for key, found in groups.items()]
    rows.sort(key=lambda row: -row.size_bytes)
    return Answer(
        name=f"out_of_memory by {by}",
        facts=_totals(failures, live_bytes),
        row_type=LiveRow,
        rows=tuple(rows),
        notes=(*_notes(trace, failures), *trace.problems),
        plots=(bars("Live memory", rows, "size_bytes"),) if rows else (),
    )


_KINDS: Final = {"buffer": "array", "executable": "program"}
# CPUs report "allocating 4096 bytes", GPUs "allocate 8.00GiB", TPUs "allocate 31.06M" or "reserve 6.50G". Prefixes are
# powers of 1024.
_REQUESTED: Final = re.compile(
    r"(?:allocat\w*|reserve)\s+(?:request\s+for\s+)?(\d+(?:\.\d+)?)\s*(bytes|B|[KMGT](?:i?B)?)\b", re.ASCII
)
_UNITS: Final = "BKMGT"
_MOST_PROGRAMS: Final = 3


def _name(stack: LiveStack, by: LiveGrouping) -> str:
    if by == "device":
        return stack.device
    line = line_of(stack.frames)
    if by == "line":
        return line
    return next((frame.function for frame in stack.frames if str(frame) == line), "")


def _row(name: str, kind: str, found: Sequence[LiveStack], live_bytes: int) -> LiveRow:
    size = sum(stack.size_bytes for stack in found)
    return LiveRow(name, kind, size, size / live_bytes if live_bytes else None, sum(stack.arrays for stack in found))


def _totals(failures: Sequence[Mapping[str, Any]], live_bytes: int) -> dict[str, Any]:
    fullest = max(
        (stats for failure in failures for stats in failure["devices"].values() if stats),
        key=lambda stats: stats.get("bytes_in_use", 0),
        default={},
    )
    return {
        "message": failures[0]["message"].partition("\n")[0] if failures else None,
        "requested_bytes": _requested_bytes(failures[0]["message"]) if failures else None,
        "live_bytes": live_bytes if failures else None,
        "fullest_device_bytes": fullest.get("bytes_in_use"),
        "fullest_device_limit_bytes": fullest.get("bytes_limit"),
        "largest_free_block_bytes": fullest.get("largest_free_block_bytes"),
    }


def _requested_bytes(message: str) -> int | None:
    match = _REQUESTED.search(message)
    return round(float(match[1]) * 1024 ** _UNITS.index(match[2][0].upper())) if match else None


def _notes(trace: Trace, failures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not failures:
        yield "No data: the capture has no out-of-memory error."
        return
    yield "Live arrays of all devices together, by the line that made them or that ran the program."
    if not any(stats for failure in failures for stats in failure["devices"].values()):
        yield "The devices have no allocator that reports its state, as CPUs."
    if found := list(_largest_programs(trace)):
        listed = ", ".join(f"{name} {number('_bytes', size)}" for size, name in found)
        yield f"Programs with the most memory while they run: {listed}. `stack profile memory --program NAME` lists it."


def _largest_programs(trace: Trace) -> Iterator[tuple[int, str]]:
    sizes: dict[str, int] = {}
    for program in trace.programs:
        sizes[program.name] = max(sizes.get(program.name, 0), total_bytes_of(program))
    yield from sorted(((size, name) for name, size in sizes.items() if size), reverse=True)[:_MOST_PROGRAMS]
