"""Peak memory of the host by the Python code that allocates."""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stack_core.report.plots import bars
from stack_profile.answer import Answer
from stack_profile.traces.host_stacks import line_of
from stack_profile.traces.python_heap import HeapPeak, HeapStack
from stack_profile.traces.trace import Trace

__all__ = ["HeapGrouping", "HeapRow", "python_heap"]

HeapGrouping = Literal["line", "function", "file"]


@dataclass(frozen=True)
class HeapRow:
    """Memory in use at the peak.

    Attributes:
      name: Python line, function or file; "" for threads without Python.
      size_bytes: size of the memory.
      size_peak_share: `size_bytes` as a share of `peak_bytes`.
      allocations: number of allocations.
      allocated_in: innermost Python function of the largest part, in a package or not.
    """

    name: str
    size_bytes: int
    size_peak_share: float | None
    allocations: int
    allocated_in: str


def python_heap(trace: Trace, *, by: HeapGrouping = "line") -> Answer[HeapRow]:
    """Show what Python code allocated the host's memory at its peak, which memray tracks.

    Args:
      by: grouping of the memory: innermost line of your own code, its function, or its file.
    """
    heaps = [heap for heap in trace.heaps if heap is not None]
    peak_bytes = sum(heap.peak_bytes for heap in heaps)
    groups: dict[str, list[HeapStack]] = collections.defaultdict(list)
    for stack in (stack for heap in heaps for stack in heap.stacks):
        groups[_name(stack, by)].append(stack)
    rows = tuple(
        sorted((_row(name, found, peak_bytes) for name, found in groups.items()), key=lambda row: -row.size_bytes)
    )
    return Answer(
        name=f"python_heap by {by}",
        facts={
            "peak_bytes": peak_bytes if heaps else None,
            "tracked_allocations": sum(heap.allocations for heap in heaps) if heaps else None,
        },
        row_type=HeapRow,
        rows=rows,
        notes=(*_notes(heaps, rows), *trace.problems),
        plots=(bars("Memory at the peak", rows, "size_bytes"),) if rows else (),
    )


def _name(stack: HeapStack, by: HeapGrouping) -> str:
    if by == "line" or not stack.frames:
        return line_of(stack.frames)
    own = next((frame for frame in stack.frames if str(frame) == line_of(stack.frames)), stack.frames[0])
    return own.function if by == "function" else own.file


def _row(name: str, found: Sequence[HeapStack], peak_bytes: int) -> HeapRow:
    size = sum(stack.size_bytes for stack in found)
    largest = max(found, key=lambda stack: stack.size_bytes)
    return HeapRow(
        name=name,
        size_bytes=size,
        size_peak_share=size / peak_bytes if peak_bytes else None,
        allocations=sum(stack.allocations for stack in found),
        allocated_in=largest.frames[0].function if largest.frames else "",
    )


def _notes(heaps: Sequence[HeapPeak], rows: Sequence[HeapRow]) -> Iterator[str]:
    if not heaps:
        yield "No data: the Python heap was not tracked. Capture with `--python-heap` (`python_heap`), for memray."
        return
    yield (
        "Memory allocated by malloc and mmap since the capture began and still in use at the peak. It includes arrays "
        "of devices that use the host's memory, as on CPUs."
    )
    if len(heaps) > 1:
        yield "Sums over processes, each at its own peak."
    if any(not row.name for row in rows):
        yield "The unnamed row is memory of threads without Python, such as XLA's."
