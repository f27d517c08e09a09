"""Traces are read whole; damaged ones as far as they go, and marked."""

import gzip
import json
import os

import numpy as np
import pytest

from stack_profile.errors import TraceError
from stack_profile.traces.xplane import MISSING, read_space


@pytest.fixture
def trace(build):
    plane = build.plane("/host:CPU")
    plane.line(
        "worker",
        plane.event("dot.1", 3, 4, hlo_op="dot.1", program_id=7, run_id=-5),
        plane.event("idle", 9, 1),
        *(plane.event("dot.1", 10 + index, 1, hlo_op="dot.1", program_id=0) for index in range(40)),
        timestamp_ns=5_000,
    )
    plane.metadata("dot.1", flops=2.5, kind="product", raw=b"\x00\x01", count=3)
    return build.space(plane, host="node-7")


def test_events_names_and_statistics(trace):
    space = read_space(trace)
    (plane,) = space.planes
    (line,) = plane.lines
    events = line.events
    assert (space.hosts, space.problems, plane.name, line.name) == (("node-7",), (), "/host:CPU", "worker")
    assert [plane.event_names[key] for key in events.metadata[:3].tolist()] == ["dot.1", "idle", "dot.1"]
    assert events.start_ps(4_000)[:2].tolist() == [4_000_000, 10_000_000]
    assert events.duration_ps[:2].tolist() == [4_000_000, 1_000_000]
    assert plane.text(int(events.stats["hlo_op"][0])) == "dot.1"
    assert events.stats["program_id"][:3].tolist() == [7, MISSING, 0]
    assert events.stats["run_id"][:2].tolist() == [-5, MISSING]
    assert plane.event_stats(1) == {"flops": 2.5, "kind": "product", "raw": b"\x00\x01", "count": 3}
    assert plane.event_stats(2) == {} and plane.event_stats(99) == {}


def test_a_text_that_stands_in_the_event_itself(build):
    plane = build.plane("/device:GPU:0")
    own = [build.message((1, plane.text("hlo_op")), (5, name)) for name in ("gemm", "copy", "gemm")]
    plane.line("Stream #1", *(build.message((1, 1), (2, 0), (3, 1), (4, stat)) for stat in own))
    (read,) = read_space(build.space(plane)).planes
    keys = read.lines[0].events.stats["hlo_op"].tolist()
    assert [read.text(key) for key in keys] == ["gemm", "copy", "gemm"]
    assert keys[0] == keys[2]


def test_sums_over_occurrences_have_no_place_in_time(build):
    plane = build.plane("/device:TPU:0")
    plane.line("XLA Ops", build.message((1, 1), (5, 30), (3, 10)), plane.event("fusion", 0, 1))
    (read,) = read_space(build.space(plane)).planes
    assert len(read.lines[0].events) == 1


def test_however_short_it_is_cut_what_is_there_is_read_and_marked(trace):
    whole = read_space(trace).planes[0].lines[0].events
    for size in range(1, 14):
        with pytest.raises(TraceError, match="not an XSpace"):
            read_space(trace[:size])
    for size in range(14, len(trace)):
        space = read_space(trace[:size])
        lines = [line for plane in space.planes for line in plane.lines]
        names = [plane.event_names for plane in space.planes]
        for line in lines:
            count = len(line.events)
            np.testing.assert_array_equal(line.events.offset_ps, whole.offset_ps[:count])
        complete = len(lines) == 1 and len(lines[0].events) == len(whole) and len(names[0]) == 2
        assert space.problems or (complete and space.planes[0].stat_names)


def test_a_damaged_line_is_a_problem_and_the_others_are_read(build):
    plane = build.plane("/host:CPU")
    plane.line("good", plane.event("a", 0, 1))
    plane.lines.append(build.message((2, "bad"), (4, b"\x0b")))
    space = read_space(build.space(plane))
    assert [(line.name, len(line.events)) for line in space.planes[0].lines] == [("good", 1), ("bad", 0)]
    (problem,) = space.problems
    assert problem.startswith("/host:CPU: ") and "damaged" in problem


def test_the_profilers_own_complaints_are_problems(build, trace):
    complaint = build.message((2, "dropped events"), (3, "buffer full"))
    assert [problem.rpartition(": ")[2] for problem in read_space(trace + complaint).problems] == [
        "dropped events",
        "buffer full",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (json.dumps({"traceEvents": []}).encode(), "it is JSON, perhaps a trace for Perfetto"),
        (gzip.compress(b"trace", mtime=0), "compressed by gzip"),
        (b"HloModule jit_f, entry_computation_layout={}", "the text of a program"),
        (b"\x08\x01", r"it starts with b'\\x08\\x01'"),
        (bytes(200), "is not an XSpace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "some.xplane.pb"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_space(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_space(tmp_path / "missing.xplane.pb")


@pytest.mark.slow  # takes 3 GB of memory
def test_events_beyond_two_and_three_gigabytes_are_read(build, tmp_path):
    plane = build.plane("/host:CPU")
    plane.line("main", plane.event("late", 7, 5))
    path, filler = tmp_path / "large.xplane.pb", 3 * 10**9
    with path.open("wb") as file:
        file.write(build.message((1, build.plane("/host:metadata").build())))
        # A field that no reader knows; the file system stores its zeros as a hole.
        file.write(build.message((15, b""))[:-1] + build.varint(filler))
        file.seek(filler, os.SEEK_CUR)
        file.write(build.space(plane))
    space = read_space(path)
    (line,) = space.planes[1].lines
    assert (line.events.offset_ps.tolist(), line.events.duration_ps.tolist()) == ([7_000_000], [5_000_000])
    assert space.problems == () and path.stat().st_size > filler
