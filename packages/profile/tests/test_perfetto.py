"""Perfetto's protobuf has every event of the report from its start to its end, with arrows and counters."""

import collections
import json

import numpy as np
import pytest

from stack_profile.perfetto import perfetto
from stack_profile.report.events import recorded_events
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import trace_of
from stack_profile.traces.wire import fields
from stack_profile.traces.xplane import read_space


def values_of(data, span=None):
    """The fields of a message by number: integers, and bytes."""
    found = collections.defaultdict(list)
    for number, value in fields(data, *(span or (0, len(data)))):
        found[number].append(value if isinstance(value, int) else data[slice(*value)])
    return found


class Decoded:
    """The slices, counters, arrows and tracks of an export, read with the numbers of Perfetto's schema."""

    def __init__(self, *traces):
        self.tracks, self.processes, self.texts = {}, {}, collections.defaultdict(dict)
        self.slices, self.counts = [], collections.defaultdict(list)
        self.starts, self.ends = {}, {}
        open_ = collections.defaultdict(list)
        packets = [values_of(packet) for packet in values_of(b"".join(perfetto(*traces)))[1]]
        for packet in packets:
            self.store(packet)
        # As Perfetto does: in order of time, otherwise of the file.
        for packet in sorted((packet for packet in packets if packet[11]), key=lambda packet: packet[8][0]):
            for event in map(values_of, packet[11]):
                (time,), (kind,), (track,) = packet[8], event[9], event[11]
                if kind == 4:
                    self.counts[self.tracks[track][1]].append(event[30][0])
                    continue
                if kind == 1:
                    open_[track].append((time, event))
                    self.starts |= dict.fromkeys(event[47], time)
                    self.ends |= dict.fromkeys(event[48], time)
                else:
                    self.close(track, time, *open_[track].pop())
        assert not any(open_.values())

    def store(self, packet):
        for each in packet[12]:
            for kind, texts in values_of(each).items():
                self.texts[kind] |= {text[1][0]: text[2][0].decode() for text in map(values_of, texts)}
        for each in map(values_of, packet[60]):
            if each[3]:
                self.processes[each[1][0]] = values_of(each[3][0])[6][0].decode()
            else:
                self.tracks[each[1][0]] = self.processes[each[5][0]], each[2][0].decode()

    def close(self, track, end, start, event):
        about = {}
        for each in map(values_of, event[4]):
            value = self.texts[29][each[17][0]] if each[17] else (each[4] or each[5] or each[2])[0]
            about[self.texts[3][each[1][0]]] = value
        name, category = self.texts[2][event[10][0]], self.texts[1][event[3][0]]
        self.slices.append((*self.tracks[track], name, category, start, end, about))

    def on(self, process, track):
        return [each for each in self.slices if each[:2] == (process, track)]


def test_each_operation_is_a_slice_with_its_line_and_layer(trace):
    decoded = Decoded(trace)
    (ops,) = trace.devices
    found = decoded.on("device CPU:0", "operations")
    edges = np.stack([ops.start_ps, ops.end_ps]) // 1000 + trace.base_ns
    names = [ops.operations[which].name for which in ops.which]
    assert sorted((name, start, end) for _, _, name, _, start, end, _ in found) == sorted(
        zip(names, *edges.tolist(), strict=True)
    )
    annotations = next(about for *_, about in found if about.get("layer") == "mlp")
    assert "conftest.py:" in annotations["line"] and "conftest.py:" in annotations["stack"]
    assert decoded.counts["step duration"] == [step.duration_ps // 1000 for step in trace.steps[ops.device]]
    recorded = recorded_events(trace, short_paths(trace))
    assert len(decoded.slices) == sum(map(len, recorded.lanes))
    assert decoded.on("host vm", "MainThread") or any(process.startswith("host ") for process, *_ in decoded.slices)


def test_arrows_lead_from_a_dispatch_to_the_first_operation_of_its_run(trace):
    decoded = Decoded(trace)
    assert decoded.starts.keys() == decoded.ends.keys()
    assert all(decoded.starts[flow] <= decoded.ends[flow] for flow in decoded.starts)
    calls = {start for *_, name, _, start, _, _ in decoded.slices if name.startswith("PjitFunction")}
    assert len(decoded.starts) == 4 and calls >= set(decoded.starts.values())


def test_counters_have_the_memory_of_an_allocator_and_the_rows_of_engine_steps(build):
    plane = build.plane("/host:CPU")
    span = json.dumps({"duration_s": 2e-6, "rows": [["a", 0, 5, 1], ["b", 0, 0, 1]]})
    sizes = {"bytes_available": 4, "peak_bytes_in_use": 9, "allocator_name": "GPU_0_bfc"}
    plane.line(
        "engine",
        plane.event("MemoryAllocation", 1, 1, bytes_allocated=5, **sizes),
        plane.event("MemoryDeallocation", 3, 1, bytes_allocated=2, **sizes),
        plane.event("stack.engine_step", 9, 1, stack_span=span),
    )
    decoded = Decoded(trace_of([read_space(build.space(plane))]))
    assert decoded.counts == {"memory in use": [5, 2], "sequences in a step": [2], "tokens in a step": [7]}


def test_nested_events_share_a_track_and_crossing_events_do_not(build):
    plane = build.plane("/host:CPU")
    plane.line("nested", plane.event("outer", 0, 10), plane.event("inner", 0, 4), plane.event("next", 4, 6))
    plane.line("crossing", plane.event("first", 0, 10), plane.event("second", 5, 10))
    decoded = Decoded(trace_of([read_space(build.space(plane))]))
    assert sorted(name for _, name in decoded.tracks.values()) == ["crossing", "crossing", "nested"]
    times = {name: (start - 1_000, end - 1_000) for _, _, name, _, start, end, _ in decoded.slices}
    assert times["inner"] == (0, 4_000) and times["next"] == (4_000, 10_000) and times["second"] == (5_000, 15_000)


def test_captures_of_one_program_share_tracks(trace):
    once, twice = Decoded(trace), Decoded(trace, trace)
    assert len(twice.slices) == 2 * len(once.slices) and twice.tracks == once.tracks


@pytest.mark.parametrize("base_ns", [0, 2**62])
def test_times_of_any_size_are_numbers_of_nine_bytes(build, base_ns):
    plane = build.plane("/host:CPU")
    plane.line("thread", plane.event("event", 1, 1), timestamp_ns=base_ns)
    ((*_, start, end, _),) = Decoded(trace_of([read_space(build.space(plane))])).slices
    assert (start, end) == (base_ns + 1_000, base_ns + 2_000)
