"""Reader of XSpace, the format of `*.xplane.pb` that JAX's profiler, XProf and TensorBoard share, into columns.

An XSpace holds planes (a host, a device), a plane holds lines (a thread, a stream), and a line holds events with a
start and a duration. Names and common statistics of events are in tables of the plane. Planes are read on first use.
https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from stack_profile.errors import TraceError
from stack_profile.traces.wire import (
    PADDING,
    Buffer,
    Spans,
    Value,
    WireError,
    fields,
    partition,
    read_fields,
    signed,
)

__all__ = ["MISSING", "Events", "Line", "Plane", "Space", "read_space"]

Stat = int | float | str | bytes

# Field numbers by message.
_SPACE_PLANES, _SPACE_ERRORS, _SPACE_WARNINGS, _SPACE_HOSTS = 1, 2, 3, 4
_PLANE_NAME, _PLANE_LINES, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA, _PLANE_STATS = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_TIMESTAMP_NS, _LINE_EVENTS = 1, 2, 3, 4
_EVENT_METADATA, _EVENT_OFFSET, _EVENT_DURATION, _EVENT_STATS, _EVENT_OCCURRENCES = 1, 2, 3, 4, 5
_STAT_METADATA, _STAT_DOUBLE, _STAT_UINT, _STAT_INT, _STAT_STRING, _STAT_BYTES, _STAT_REFERENCE = 1, 2, 3, 4, 5, 6, 7
_METADATA_NAME, _METADATA_DISPLAY_NAME, _METADATA_STATS = 2, 4, 5

# Statistics of single events that become columns. They join an operation with its program, its run, its end and its
# launch on the host, and hold times on a TPU's own clock and the state of an allocator.
_TEXT: Final = (
    "hlo_op", "hlo_module", "tf_op", "_ipl_stage_name", "_ipl_stage_cat", "_ipl_dataset_name", "allocator_name",
    "stack_span",
)  # fmt: skip
_NUMBERS: Final = (
    "program_id", "run_id", "device_ordinal", "step_num", "group_id", "_pt", "_p", "_ct", "_c", "device_offset_ps",
    "device_duration_ps", "correlation_id", "cuda_graph_node_id", "unique_hlo_op_id", "bytes_allocated",
    "bytes_available", "peak_bytes_in_use",
)  # fmt: skip
_CHUNK: Final = 1 << 17  # events per chunk, to bound the memory for statistics

MISSING: Final = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Events:
    """Events of one line, one per row.

    Attributes:
      timestamp_ns: zero of the line's clock, since the epoch for traces that record the time.
      metadata: key of each event in its plane's tables.
      offset_ps, duration_ps: start of each event on the line's clock, and its duration.
      stats: statistics by name, int64 with `MISSING` for absent ones; texts are keys for `Plane.text`.
    """

    timestamp_ns: int
    metadata: np.ndarray
    offset_ps: np.ndarray
    duration_ps: np.ndarray
    stats: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.metadata)

    def start_ps(self, base_ns: int) -> np.ndarray:
        """Returns times since `base_ns`; picoseconds since the epoch would overflow 64 bits."""
        return (self.timestamp_ns - base_ns) * 1000 + self.offset_ps

    def shift(self, base_ns: int, correction_ps: Callable[[np.ndarray], np.ndarray]) -> "Events":
        """Returns the events at corrected times; `correction_ps` takes and returns picoseconds since `base_ns`."""
        start = self.start_ps(base_ns)
        zero_ps = np.array([(self.timestamp_ns - base_ns) * 1000])
        timestamp_ns = self.timestamp_ns + int(correction_ps(zero_ps)[0]) // 1000
        offset_ps = start + correction_ps(start) - (timestamp_ns - base_ns) * 1000
        return replace(self, timestamp_ns=timestamp_ns, offset_ps=offset_ps)


@dataclass(frozen=True)
class Line:
    """A thread of a host, a stream of a device, or a row derived from them.

    Attributes:
      name: name of the line.
      events: events of the line.
      id: number of the line; for a thread of a host, a hash of its identifier, see `host_stacks.thread_of`.
    """

    name: str
    events: Events
    id: int = 0


@dataclass
class Plane:
    """A host or a device; its tables and lines are read on first use.

    Attributes:
      name: name of the plane.
      host: name of the host.
      origin_ns: start of the recording if the lines' times count from there; 0 if they are absolute.
      problems: descriptions of unreadable parts; all readable parts are present.
    """

    name: str
    host: str
    origin_ns: int
    problems: list[str]
    _data: Buffer = field(repr=False)
    _array: np.ndarray = field(repr=False)
    _start: int
    _end: int
    _texts: list[str] = field(default_factory=list)

    @functools.cached_property
    def stat_names(self) -> Mapping[int, str]:
        found = {}
        for key, place in self._entries(_PLANE_STAT_METADATA):
            name = [value for number, value in self._fields(place) if number == _METADATA_NAME]
            found[key] = self._text(name[0]) if name else ""
        return found

    @functools.cached_property
    def _stat_keys(self) -> Mapping[str, int]:
        return {name: key for key, name in self.stat_names.items()}

    @functools.cached_property
    def _columns(self) -> Mapping[str, int]:
        """Statistics of this plane that become columns, with their keys."""
        return {name: self._stat_keys[name] for name in _KEPT if name in self._stat_keys}

    @functools.cached_property
    def event_names(self) -> Mapping[int, str]:
        """Names of events by key; operations of devices have their short name, not the text of the instruction."""
        names = {}
        for key, place in self._metadata.items():
            found = {number: value for number, value in self._fields(place) if number != _METADATA_STATS}
            name = found.get(_METADATA_DISPLAY_NAME) or found.get(_METADATA_NAME)
            names[key] = self._text(name) if name else ""
        return names

    @functools.cached_property
    def stats(self) -> Mapping[str, Stat]:
        """Statistics of the plane itself."""
        places = (value for number, value in self._fields((self._start, self._end)) if number == _PLANE_STATS)
        return dict(map(self._stat, places))

    def event_stats(self, key: int) -> Mapping[str, Stat]:
        """Returns the statistics that all events of a key share."""
        place = self._metadata.get(key)
        found = self._fields(place) if place else ()
        return dict(self._stat(value) for number, value in found if number == _METADATA_STATS)

    def text(self, key: int) -> str:
        """Returns the text of a key in a column of texts."""
        # Negative keys stand for texts that events contain themselves (`_inline_text`).
        if -len(self._texts) <= key < 0:
            return self._texts[-1 - key]
        return self.stat_names.get(key, "")

    @functools.cached_property
    def lines(self) -> tuple[Line, ...]:
        spans, _, problem = partition(self._data, _PLANE_LINES, self._start, self._end, cut=True)
        if problem:
            self._problem(problem)
        return tuple(map(self._line, spans.starts.tolist(), spans.ends.tolist()))

    def shift(self, base_ns: int, correction_ps: Callable[[np.ndarray], np.ndarray]) -> "Plane":
        """Returns a copy with events at corrected times, see `Events.shift`."""
        plane = copy.copy(self)
        lines = (replace(line, events=line.events.shift(base_ns, correction_ps)) for line in self.lines)
        vars(plane)["lines"] = tuple(lines)
        return plane

    def _fields(self, place: tuple[int, int]) -> Iterator[tuple[int, Value]]:
        """Yields the fields of a message up to the first unreadable one."""
        try:
            yield from fields(self._data, *place)
        except WireError as error:
            self._problem(str(error))

    def _problem(self, problem: str) -> None:
        if not self.problems:  # one truncation also truncates everything inside, so the first message is enough
            self.problems.append(problem)

    def _text(self, place: Value) -> str:
        return self._data[slice(*place)].decode(errors="replace") if isinstance(place, tuple) else ""

    def _entries(self, number: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields (key, location of the value) for the entries of a map."""
        for found, place in self._fields((self._start, self._end)):
            if found == number and isinstance(place, tuple):
                entry = dict(self._fields(place))
                key, value = entry.get(1, 0), entry.get(2)
                if isinstance(key, int) and isinstance(value, tuple):
                    yield signed(key), value

    @functools.cached_property
    def _metadata(self) -> Mapping[int, tuple[int, int]]:
        return dict(self._entries(_PLANE_EVENT_METADATA))

    def _stat(self, place: Value) -> tuple[str, Stat]:
        key, value = 0, 0
        for number, found in self._fields(place) if isinstance(place, tuple) else ():
            if number == _STAT_METADATA and isinstance(found, int):
                key = found
            elif isinstance(found, int):
                value = self.stat_names.get(found, "") if number == _STAT_REFERENCE else signed(found)
            elif number == _STAT_DOUBLE:
                value = float(np.frombuffer(self._data, "<f8", 1, found[0])[0])
            else:
                value = bytes(self._data[slice(*found)]) if number == _STAT_BYTES else self._text(found)
        return self.stat_names.get(key, ""), value

    def _line(self, start: int, end: int) -> Line:
        # Without `cut`, because a truncated event may lack its duration.
        spans, others, problem = partition(self._data, _LINE_EVENTS, start, end)
        if problem:
            self._problem(problem)
        named = dict(others)
        return Line(
            name=self._text(named.get(_LINE_NAME, 0)),
            events=self._events(spans, self.origin_ns + signed(_integer(named.get(_LINE_TIMESTAMP_NS)))),
            id=_integer(named.get(_LINE_ID)),
        )

    def _events(self, spans: Spans, timestamp_ns: int) -> Events:
        try:
            # One chunk even without events, which gives the columns their dtypes.
            chunks = [self._chunk(spans[first : first + _CHUNK]) for first in range(0, len(spans) or 1, _CHUNK)]
        except WireError as error:
            self._problem(str(error))
            chunks = [self._chunk(spans[:0])]
        columns = [np.concatenate(column) for column in zip(*chunks, strict=True)]
        # The chunks are as large as the columns.
        del chunks
        placed = columns[3] == 0  # aggregates of many occurrences have no time
        if not placed.all():
            columns = [column[placed] for column in columns]
        metadata, offset_ps, duration_ps, _, *found = columns
        # A broadcast number, because most statistics are absent and a column takes 8 bytes per event.
        none = np.broadcast_to(np.int64(MISSING), len(metadata))
        stats = {**dict.fromkeys(_KEPT, none), **dict(zip(self._columns, found, strict=True))}
        return Events(timestamp_ns, metadata, offset_ps, duration_ps, stats)

    def _chunk(self, spans: Spans) -> list[np.ndarray]:
        """Returns metadata, offset, duration and occurrences of events, then the statistics that become columns."""
        numbers = (_EVENT_METADATA, _EVENT_OFFSET, _EVENT_DURATION, _EVENT_OCCURRENCES)
        columns, stats, owners = read_fields(self._array, spans, numbers, _EVENT_STATS)
        values, _, _ = read_fields(self._array, stats, tuple(range(_STAT_METADATA, _STAT_REFERENCE + 1)))
        kept = []
        for key in self._columns.values():
            column = np.full(len(spans), MISSING)
            which = np.flatnonzero(values[_STAT_METADATA] == key)
            column[owners[which]] = self._column(values, which)
            kept.append(column)
        return [*(columns[number].view(np.int64) for number in numbers), *kept]

    def _column(self, values: Mapping[int, np.ndarray], which: np.ndarray) -> np.ndarray:
        """Returns the value of each statistic: an integer, or the key of a text."""
        # A statistic has one of these fields, and absent fields are 0.
        column = values[_STAT_UINT][which] | values[_STAT_INT][which] | values[_STAT_REFERENCE][which]
        column = column.view(np.int64)
        places = values[_STAT_STRING][which]
        for row in np.flatnonzero(places):
            column[row] = self._inline_text(int(places[row]))
        return column

    def _inline_text(self, place: int) -> int:
        """Returns the key of a text stored in the event itself, with its length at `place`."""
        # The tag before the length takes one byte.
        text = self._text(next(fields(self._data, place - 1))[1])
        if text not in self._texts:
            self._texts.append(text)
        return -1 - self._texts.index(text)


@dataclass(frozen=True)
class Space:
    """A trace written by one process, or merged from several.

    Attributes:
      planes: hosts and devices.
      hosts: names of the hosts.
      problems: problems that the trace reports, and unreadable parts; empty if it is complete.
    """

    planes: tuple[Plane, ...]
    hosts: tuple[str, ...]
    _reported: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems known so far; reading planes may add more."""
        return (*self._reported, *(f"{plane.name}: {text}" for plane in self.planes for text in plane.problems))


def read_space(source: Path | bytes) -> Space:
    """Reads a trace; truncated or damaged parts are missing and listed in `problems`.

    Raises:
      TraceError: the file does not exist, is empty, or is not a trace.
    """
    name = repr(str(source)) if isinstance(source, Path) else "The trace"
    data, size = _load(source, name)
    if size == 0:
        raise TraceError(f"{name} is empty: the capture was stopped before it was written. Capture again.")
    # The last plane of a truncated trace still has readable events.
    spans, others, problem = partition(data, _SPACE_PLANES, 0, size, cut=True)
    texts = [(number, _decode(data, value)) for number, value in others]
    hosts = tuple(text for number, text in texts if number == _SPACE_HOSTS)
    reported = [f"the profiler reports: {text}" for number, text in texts if number in (_SPACE_ERRORS, _SPACE_WARNINGS)]
    places = list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True))
    if problem:
        reported.append(f"{name} is damaged or cut off, {problem}")
    planes = tuple(_plane(data, start, end, hosts[0] if hosts else "") for start, end in places)
    _set_origin(planes)
    if not planes or not all(plane.name for plane in planes[:1]):
        raise TraceError(
            f"{name} is not an XSpace, the format of *.xplane.pb{_seems(bytes(data[:size]))}. Name a file of that "
            "format, or a directory written by `stack profile run` or jax.profiler.trace."
        )
    return Space(planes, hosts, tuple(reported))


_KEPT: Final = (*_TEXT, *_NUMBERS)
_ENVIRONMENT, _STARTED_NS = "Task Environment", "profile_start_time"


def _seems(data: bytes) -> str:
    """Describes the format of a file that is not a trace."""
    form = next((form for start, form in _FORMATS.items() if data.lstrip().startswith(start)), None)
    return f": it is {form}" if form else f": it starts with {data[:16]!r}"


_FORMATS: Final = {
    b"\x1f\x8b": "compressed by gzip, as the *.trace.json.gz for Perfetto and the memory profiles of JAX are",
    b"{": "JSON, perhaps a trace for Perfetto, or the *.capture.json of a capture",
    b"[": "JSON, perhaps a trace for Perfetto",
    b"PK": "a zip archive",
    b"HloModule": "the text of a program",
    b"<": "a page for a browser",
}


def _load(source: Path | bytes, name: str) -> tuple[bytearray, int]:
    """Returns the bytes with padding, and their number without padding."""
    if isinstance(source, bytes):
        return bytearray(source) + bytes(PADDING), len(source)
    try:
        size = source.stat().st_size
        # The padding is part of the buffer, so the file is read without another copy.
        data = bytearray(size + PADDING)
        with source.open("rb") as file:
            return data, file.readinto(memoryview(data)[:size])
    except OSError as error:
        raise TraceError(f"{name} cannot be read: {error}") from error


def _plane(data: bytearray, start: int, end: int, host: str) -> Plane:
    name = ""
    try:
        for number, value in fields(data, start, end):
            if number == _PLANE_NAME:
                name = _decode(data, value)
                break
    except WireError:
        pass  # damage before the name makes the plane useless; damage after it is reported when the plane is read
    return Plane(name, host, 0, [], data, np.frombuffer(data, np.uint8), start, end)


def _set_origin(planes: Sequence[Plane]) -> None:
    """Sets the origin of times, which JAX's profiler records in a plane of its own, separately for each process."""
    for environment in (plane for plane in planes if plane.name == _ENVIRONMENT):
        origin_ns = environment.stats.get(_STARTED_NS)
        if isinstance(origin_ns, int):
            for plane in planes:
                plane.origin_ns = origin_ns


def _decode(data: bytearray, value: Value) -> str:
    return data[slice(*value)].decode(errors="replace") if isinstance(value, tuple) else ""


def _integer(value: Value | None) -> int:
    return value if isinstance(value, int) else 0
