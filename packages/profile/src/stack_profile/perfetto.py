"""Traces in Perfetto's protobuf format, for https://ui.perfetto.dev and `trace_processor`.

A file is a `Trace`: a sequence of packets on one packet sequence, with texts that are stored once and then referenced
by number. The numbers of fields are those of `protos/perfetto/trace/perfetto_trace.proto` in Perfetto's repository.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stack_profile.captures.processes import names_of
from stack_profile.report.events import Recorded, recorded_events
from stack_profile.report.lanes import Lane, host_group
from stack_profile.traces.allocator import allocator_histories
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import Trace
from stack_profile.traces.wire import encode_bytes, encode_varint
from stack_profile.traces.work_spans import work_spans

__all__ = ["perfetto"]


def perfetto(*traces: Trace) -> Iterator[bytes]:
    """Yields the parts of one Perfetto trace; several captures of a program share its tracks.

    Devices and hosts are processes. Their tracks are the lanes of the report: steps, operations, threads, sampled
    Python stacks, collectives, requests and so on. Concurrent events are on several tracks of the same name. Arrows
    (flows) lead from a dispatch to the first operation that it starts on each device. Counters have the memory of
    allocators, the duration of steps, and the sequences and tokens of a server's steps. Times are rounded down to
    nanoseconds.
    """
    writer = _Writer()
    for trace in traces:
        yield from writer.packets(trace)


_EVERYTHING: Final = 1 << 62
_NANOSECOND_PS: Final = 1000
_BATCH: Final = 1 << 12

# Fields of messages, by name of the message.
_TRACE_PACKET: Final = 1
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _TRACK = 6, 8, 10, 11, 12, 13, 60
_EVENT_CATEGORY, _EVENT_ANNOTATION, _EVENT_TYPE, _EVENT_NAME, _EVENT_TRACK = 3, 4, 9, 10, 11
_EVENT_COUNT, _EVENT_FLOW, _EVENT_LAST_FLOW = 30, 47, 48
_INTERNED_FIELDS: Final = {"category": 1, "name": 2, "annotation": 3, "text": 29}
_BEGIN, _END, _COUNTER = 1, 2, 4  # types of events
_CLEARED, _NEEDED = 1, 2  # flags: texts stored before are forgotten; packet uses stored texts
_REALTIME, _BOOTTIME = 1, 6  # clocks
_NANOSECONDS, _COUNT, _BYTES = 1, 2, 3  # units
_BY_RANK: Final = 3

# Properties of events that are not exported as annotations.
_OTHER_PROPERTIES: Final = frozenset({"type", "name", "category", "stack", "outer", "contains", "calling", "file"})


class _Writer:
    """Writer of one file, which numbers its processes, tracks, flows and texts."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], int] = {}
        self._fresh: dict[str, list[bytes]] = {kind: [] for kind in _INTERNED_FIELDS}  # not yet in the file
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[object, ...], int] = {}
        self._descriptors: list[bytes] = []
        self._uuids, self._flows = itertools.count(1), itertools.count(1)
        self._started = False

    def packets(self, trace: Trace) -> Iterator[bytes]:
        recorded = recorded_events(trace, short_paths(trace), limit=_EVERYTHING)
        devices = {each.device for each in trace.devices}
        heads = [self._head(recorded, kind) for kind in recorded.kinds]
        flows = self._flows_of(recorded)
        if not self._started:
            yield self._first_packets(trace.base_ns)
            self._started = True
        place = 0
        names: dict[tuple[str, str], int] = {}
        for lane in recorded.lanes:
            key = lane.group, lane.name
            names[key] = names.get(key, -1) + 1
            process = self._process(lane.group, devices)
            rows = range(1 if _nests(lane) else lane.rows)
            tracks = [self._track(process, lane.name, names[key], row) for row in rows]
            yield self._texts_and_tracks()
            yield from _slices(lane, tracks, heads, flows, place, trace.base_ns)
            place += len(lane)
        yield from self._counters(trace, devices)

    def _first_packets(self, base_ns: int) -> bytes:
        # Times are nanoseconds since the epoch, which this packet declares to be the trace's clock.
        clocks = ((1, _message((1, clock), (2, base_ns))) for clock in (_REALTIME, _BOOTTIME))
        return _packet((_CLOCK_SNAPSHOT, _message(*clocks))) + _packet((_FLAGS, _CLEARED))

    def _texts_and_tracks(self) -> bytes:
        """Returns the packets that store new texts and describe new tracks."""
        found = b""
        if any(self._fresh.values()):
            stored = (
                encode_bytes(_INTERNED_FIELDS[kind], each) for kind, texts in self._fresh.items() for each in texts
            )
            found = _packet((_INTERNED, b"".join(stored)), (_FLAGS, _NEEDED))
            self._fresh = {kind: [] for kind in _INTERNED_FIELDS}
        found += b"".join(_packet((_TRACK, each)) for each in self._descriptors)
        self._descriptors.clear()
        return found

    def _text(self, kind: str, text: str) -> int:
        number = self._texts.get((kind, text))
        if number is None:
            number = self._texts[kind, text] = len(self._texts) + 1
            self._fresh[kind].append(_message((1, number), (2, text)))
        return number

    def _process(self, group: str, devices: Iterable[str]) -> int:
        name = f"device {group}" if group in devices else group
        if name not in self._processes:
            uuid = self._processes[name] = next(self._uuids)
            about = _message((1, len(self._processes)), (6, name))
            self._descriptors.append(_message((1, uuid), (3, about), (11, _BY_RANK)))
        return self._processes[name]

    def _track(self, process: int, name: str, number: int, row: int, unit: int | None = None) -> int:
        key = process, name, number, row, unit
        if key not in self._tracks:
            uuid = self._tracks[key] = next(self._uuids)
            counter = [] if unit is None else [(8, _message((3, unit)))]
            self._descriptors.append(_message((1, uuid), (2, name), (5, process), *counter, (12, len(self._tracks))))
        return self._tracks[key]

    def _head(self, recorded: Recorded, kind: Mapping[str, Any]) -> bytes:
        """Returns the fields that all events of a kind share: name, category and annotations."""
        category = str(kind.get("category") or kind["type"])
        properties = {name: value for name, value in kind.items() if name not in _OTHER_PROPERTIES}
        if "stack" in kind:
            frames = (recorded.frames[each] for each in recorded.stacks[kind["stack"]])
            properties["stack"] = "\n".join(f"{file}:{line} {function}" for file, line, function, _ in frames)
        annotations = ((_EVENT_ANNOTATION, self._annotation(name, value)) for name, value in properties.items())
        return _message(
            (_EVENT_NAME, self._text("name", str(kind["name"]))),
            (_EVENT_CATEGORY, self._text("category", category)),
            *annotations,
        )

    def _annotation(self, name: str, value: Any) -> bytes:
        name_field = (1, self._text("annotation", name))
        if isinstance(value, float):
            return _message(name_field) + encode_varint(5 << 3 | 1) + struct.pack("<d", value)
        if isinstance(value, int):
            return _message(name_field, (2 if isinstance(value, bool) else 4, int(value)))
        return _message(name_field, (17, self._text("text", str(value))))

    def _flows_of(self, recorded: Recorded) -> dict[int, bytes]:
        """Returns the flow fields of events, by their index over all lanes."""
        flows: dict[int, bytes] = {}
        place = 0
        for lane in recorded.lanes:
            senders = recorded.dispatched_by[place : place + len(lane)].astype(np.int64) - 1
            # An arrow to each of a program's thousands of operations would hide the timeline.
            distinct, first = np.unique(senders, return_index=True)
            for sender, row in zip(distinct.tolist(), first.tolist(), strict=True):
                if sender >= 0:
                    flow = struct.pack("<Q", next(self._flows))
                    flows[sender] = flows.get(sender, b"") + encode_varint(_EVENT_FLOW << 3 | 1) + flow
                    flows[place + row] = flows.get(place + row, b"") + encode_varint(_EVENT_LAST_FLOW << 3 | 1) + flow
            place += len(lane)
        return flows

    def _counters(self, trace: Trace, devices: Iterable[str]) -> Iterator[bytes]:
        for group, name, unit, time_ps, values in _counts(trace):
            track = self._track(self._process(group, devices), name, 0, 0, unit)
            yield self._texts_and_tracks()
            times = _timestamps(time_ps, trace.base_ns)
            head = _message((_EVENT_TYPE, _COUNTER), (_EVENT_TRACK, track))
            events = (_message((_EVENT_COUNT, int(value))) for value in values)
            yield b"".join(_timed(time, head + event) for time, event in zip(times, events, strict=True))


def _counts(trace: Trace) -> Iterator[tuple[str, str, int, np.ndarray, Sequence[int]]]:
    """Yields group, name, unit, times and values of each counter."""
    for device, steps in trace.steps.items():
        if steps:
            starts = np.array([step.start_ps for step in steps], np.int64)
            yield device, "step duration", _NANOSECONDS, starts, [step.duration_ps // _NANOSECOND_PS for step in steps]
    for each in allocator_histories(trace.spaces, trace.base_ns):
        yield each.device, "memory in use", _BYTES, each.time_ps, each.allocated_bytes.tolist()
    for space, prefix in zip(trace.spaces, names_of(trace.spaces), strict=True):
        steps = [span for span in work_spans(space, trace.base_ns) if span.name == "engine_step"]
        if not steps:
            continue
        group, starts = host_group(trace, prefix), np.array([span.start_ps for span in steps], np.int64)
        rows = [span.fields["rows"] for span in steps]
        yield group, "sequences in a step", _COUNT, starts, [len(each) for each in rows]
        tokens = [sum(prompt + new for _, _, prompt, new in each) for each in rows]
        yield group, "tokens in a step", _COUNT, starts, tokens


def _nests(lane: Lane) -> bool:
    """Returns whether all events of a lane fit on one track, whose rows are the depth of nesting."""
    return lane.type in ("thread", "stacks", "input") and _is_nested(lane.start_ps, lane.start_ps + lane.duration_ps)


def _is_nested(start: np.ndarray, end: np.ndarray) -> bool:
    open_: list[int] = []
    for row in np.lexsort((-end, start)).tolist():
        while open_ and open_[-1] <= start[row]:
            open_.pop()
        if open_ and open_[-1] < end[row]:
            return False
        open_.append(int(end[row]))
    return True


def _slices(
    lane: Lane, tracks: Sequence[int], heads: Sequence[bytes], flows: Mapping[int, bytes], place: int, base_ns: int
) -> Iterator[bytes]:
    """Yields the packets of a lane's events, whose first one has the index `place`."""
    begins = [_message((_EVENT_TYPE, _BEGIN), (_EVENT_TRACK, track)) for track in tracks]
    ends = [_message((_EVENT_TYPE, _END), (_EVENT_TRACK, track)) for track in tracks]
    start, end = lane.start_ps, lane.start_ps + lane.duration_ps
    row = np.zeros(len(lane), np.int64) if len(tracks) == 1 else lane.row
    # Outer events come first, because Perfetto keeps the order of packets with equal times.
    order = np.lexsort((-end, start, row)).tolist()
    starts, finishes = _timestamps(start, base_ns), _timestamps(end, base_ns)
    columns = (start.tolist(), end.tolist(), row.tolist(), lane.kind.tolist())
    found: list[bytes] = []
    open_: list[int] = []
    for each, following in itertools.zip_longest(order, order[1:]):
        track = columns[2][each]
        fields = begins[track] + heads[columns[3][each]] + flows.get(place + each, b"")
        found.append(_timed(starts[each], fields))
        open_.append(each)
        is_last = following is None or columns[2][following] != track
        while open_ and (is_last or columns[1][open_[-1]] <= columns[0][following]):
            found.append(_timed(finishes[open_.pop()], ends[track]))
        if len(found) >= _BATCH:
            yield b"".join(found)
            found.clear()
    yield b"".join(found)


def _timestamps(time_ps: np.ndarray, base_ns: int) -> list[bytes]:
    """Returns the field "timestamp" of each time: a number of 9 bytes, which 63 bits always fit."""
    times = base_ns + time_ps // _NANOSECOND_PS
    digits = (times[:, None] >> (7 * np.arange(9)) & 127).astype(np.uint8)
    digits[:, :-1] |= 128
    tag = np.full((len(times), 1), _TIMESTAMP << 3, np.uint8)
    data = np.concatenate([tag, digits], axis=1).tobytes()
    return [data[place : place + 10] for place in range(0, len(data), 10)]


def _timed(timestamp: bytes, event: bytes) -> bytes:
    content = timestamp + _COMMON + encode_bytes(_TRACK_EVENT, event)
    return encode_bytes(_TRACE_PACKET, content)


def _packet(*fields: tuple[int, int | str | bytes]) -> bytes:
    return encode_bytes(_TRACE_PACKET, _message(*fields, (_SEQUENCE, 1)))


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Encodes fields of integers, texts and messages."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += encode_varint(number << 3), encode_varint(value)
        else:
            parts.append(encode_bytes(number, value.encode() if isinstance(value, str) else value))
    return b"".join(parts)


_COMMON: Final = _message((_SEQUENCE, 1), (_FLAGS, _NEEDED))
