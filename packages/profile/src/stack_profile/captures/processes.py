"""Files of a capture, one set per process, and checks for reading them as one trace.

Times come from each host's clock: exact to microseconds on one host, and as good as the clocks' synchronization across
hosts, about a millisecond with NTP. `stack_profile.traces.meetings` corrects clocks that collectives contradict.
"""

import glob
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stack_profile.errors import TraceError
from stack_profile.traces.xplane import Space

__all__ = [
    "HEAP_SUFFIX",
    "LIVE_SUFFIX",
    "STACKS_SUFFIX",
    "SUFFIX",
    "about_of",
    "captured_programs",
    "disjoint_reasons",
    "incomplete_reasons",
    "names_of",
    "stem",
]

SUFFIX: Final = ".xplane.pb"
STACKS_SUFFIX: Final = ".stacks.json.gz"  # sampled Python stacks of the same process
HEAP_SUFFIX: Final = ".heap.json.gz"  # its Python heap at the peak
LIVE_SUFFIX: Final = ".live.pb.gz"  # its arrays when a device was out of memory


def stem(file: Path) -> str:
    """Returns the common stem of a process's files: its host, and its index if there are several processes."""
    return file.name.removesuffix(SUFFIX)


def about_of(file: Path) -> Mapping[str, Any]:
    """Returns the metadata that the capture wrote about its process; empty for traces of other tools."""
    try:
        about = json.loads(file.with_name(f"{stem(file)}.capture.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def captured_programs(file: Path) -> tuple[bytes, ...]:
    """Returns the HloProtos that a capture wrote next to its trace."""
    # The name of a host may contain characters of globs.
    return tuple(path.read_bytes() for path in sorted(file.parent.glob(f"{glob.escape(stem(file))}.*.hlo.pb")))


def names_of(spaces: Sequence[Space]) -> list[str]:
    """Returns a prefix for the devices of each process: empty for a single process, otherwise based on its host."""
    if len(spaces) == 1:
        return [""]
    hosts = [space.hosts[0] if space.hosts else str(index) for index, space in enumerate(spaces)]
    # Processes of one host get numbers, because names of devices must be unique.
    numbers = [f"{host}_{hosts[:index].count(host)}" for index, host in enumerate(hosts)]
    return [f"{name}:" for name in (hosts if len(set(hosts)) == len(hosts) else numbers)]


def incomplete_reasons(files: Sequence[Path], abouts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields reasons why the captures are not complete."""
    for file, about in zip(files, abouts, strict=True):
        if partial := about.get("partial"):
            yield f"{file.name} is partial: {partial}"
    counts = {tuple(about["process"])[1] for about in abouts if len(about.get("process", ())) == 2}
    expected = max(counts, default=1)
    if len(counts) > 1 or len(files) < expected:
        yield f"The run had {' or '.join(map(str, sorted(counts)))} processes, and {len(files)} are in the trace."


def disjoint_reasons(files: Sequence[Path], spaces: Sequence[Space]) -> Iterator[str]:
    """Yields reasons why captures that do not overlap in time are not one run.

    Raises:
      TraceError: the captures are over 30 days apart.
    """
    extents = sorted(extent for file, space in zip(files, spaces, strict=True) if (extent := _extent(file, space)))
    for (_, end_ns, first), (start_ns, _, second) in itertools.pairwise(extents):
        if start_ns > end_ns:
            apart_s = (start_ns - end_ns) / 1e9
            if apart_s > _LONGEST_S:
                raise TraceError(
                    f"{second} begins {apart_s / 86400:,.0f} days after the end of {first}; they are not one trace. "
                    "Name one of them."
                )
            yield (
                f"{second} begins {apart_s:.3g} s after the end of {first}: they are of different runs, or the clocks "
                "of their hosts disagree."
            )


_LONGEST_S: Final = 30 * 86400  # beyond about 107 days, picoseconds overflow int64


def _extent(file: Path, space: Space) -> tuple[int, int, str] | None:
    """Returns (start, end, file name) of a file's events, in ns since the epoch; None without events."""
    lines = [line.events for plane in space.planes for line in plane.lines if len(line.events)]
    if not lines:
        return None
    starts = [events.timestamp_ns + int(events.offset_ps.min()) // 1000 for events in lines]
    ends = [events.timestamp_ns + int((events.offset_ps + events.duration_ps).max()) // 1000 for events in lines]
    return min(starts), max(ends), file.name
