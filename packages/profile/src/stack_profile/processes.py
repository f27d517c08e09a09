"""The files of a capture, one process each, and what is assumed when they are read as one trace.

Times of all processes are those of their hosts' clocks: exact to microseconds on one host, on several as good as these
are synchronized, which NTP does to a millisecond or so. Nothing is shifted.
"""

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stack_profile.xplane import Space

__all__ = ["SUFFIX", "about_of", "names_of", "problems_of", "programs_beside", "stem"]

SUFFIX: Final = ".xplane.pb"


def stem(file: Path) -> str:
    """What the files of one process share: host, and process where there are several."""
    return file.name.removesuffix(SUFFIX)


def about_of(file: Path) -> Mapping[str, Any]:
    """What the capture wrote of its process; other tools write nothing."""
    try:
        about = json.loads(file.with_name(f"{stem(file)}.capture.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def programs_beside(file: Path) -> tuple[bytes, ...]:
    """The HloProtos that a capture wrote beside its trace."""
    return tuple(path.read_bytes() for path in sorted(file.parent.glob(f"{glob.escape(stem(file))}.*.hlo.pb")))


def names_of(spaces: Sequence[Space]) -> list[str]:
    """What tells the devices of each process from the others': nothing where there is one, else its host."""
    if len(spaces) == 1:
        return [""]
    hosts = [space.hosts[0] if space.hosts else str(index) for index, space in enumerate(spaces)]
    numbers = [f"{host}_{hosts[:index].count(host)}" for index, host in enumerate(hosts)]
    return [f"{name}:" for name in (hosts if len(set(hosts)) == len(hosts) else numbers)]


def problems_of(files: Sequence[Path], abouts: Sequence[Mapping[str, Any]], spaces: Sequence[Space]) -> Iterator[str]:
    """Why the captures of the processes are not the whole of one run."""
    for file, about in zip(files, abouts, strict=True):
        if partial := about.get("partial"):
            yield f"{file.name} is partial: {partial}"
    counts = {tuple(about["process"])[1] for about in abouts if len(about.get("process", ())) == 2}
    expected = max(counts, default=1)
    if len(counts) > 1 or len(files) < expected:
        yield f"The run had {' or '.join(map(str, sorted(counts)))} processes, and {len(files)} are in the trace."
    extents = {file.name: extent for file, space in zip(files, spaces, strict=True) if (extent := _extent_ns(space))}
    first_end = min(extents, key=lambda name: extents[name][1], default="")
    last_start = max(extents, key=lambda name: extents[name][0], default="")
    if extents and extents[last_start][0] > extents[first_end][1]:
        apart_s = (extents[last_start][0] - extents[first_end][1]) / 1e9
        yield (
            f"{last_start} begins {apart_s:.3g} s after the end of {first_end}: they are of different runs, or the "
            "clocks of their hosts disagree."
        )


def _extent_ns(space: Space) -> tuple[int, int] | None:
    """From the first event to the end of the last, since the epoch."""
    starts, ends = [], []
    for events in (line.events for plane in space.planes for line in plane.lines if len(line.events)):
        starts.append(events.timestamp_ns + int(events.offset_ps.min()) // 1000)
        ends.append(events.timestamp_ns + int((events.offset_ps + events.duration_ps).max()) // 1000)
    return (min(starts), max(ends)) if starts else None
