"""The data that a page embeds is the trace's, in lanes and with short names of files."""

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stack_profile.analyses.ops import ops
from stack_profile.report.encoding import pack, pack_json
from stack_profile.report.events import recorded_events
from stack_profile.report.links import Links
from stack_profile.report.sources import sources
from stack_profile.traces.short_paths import ShortPaths, short_paths
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

WEB = Path(__file__).parents[2] / "web"
PAGE = Path(__file__).parents[2] / "src" / "stack_profile" / "report"


def unpacked(packed):
    data, place, found = zlib.decompress(base64.b64decode(packed["data"])), 0, {}
    for name, dtype in packed["columns"]:
        size = np.dtype(dtype).itemsize * packed["length"]
        planes = np.frombuffer(data[place : place + size], np.uint8).reshape(np.dtype(dtype).itemsize, packed["length"])
        found[name], place = np.ascontiguousarray(planes.T).view(f"<{dtype}").reshape(-1), place + size
    return found


def test_columns_survive_their_encoding():
    columns = {
        "start": np.array([0, 5, 2**40], np.int64),
        "inside": np.array([0.0, 0.25, -1.5]),
        "kind": np.array([0, 1, 2**31], np.uint32),
    }
    found = unpacked(pack(columns))
    assert all((found[name] == column).all() for name, column in columns.items())
    assert unpacked(pack({"kind": np.zeros(0, np.uint32)}))["kind"].size == 0
    assert json.loads(zlib.decompress(base64.b64decode(pack_json({"a": "</script>"})))) == {"a": "</script>"}


def test_every_operation_is_an_event_with_its_times(trace):
    recorded = recorded_events(trace, short_paths(trace))
    (device,) = trace.devices
    lane = next(lane for lane in recorded.lanes if lane.type == "operations")
    columns = unpacked(pack(recorded.columns))
    first = sum(len(each) for each in recorded.lanes[: recorded.lanes.index(lane)])
    rows = slice(first, first + len(lane))
    assert (np.cumsum(columns["start"][rows]) == device.start_ps).all()
    assert (columns["duration"][rows] == device.end_ps - device.start_ps).all()
    assert columns["duration"][rows] - columns["inside"][rows] == pytest.approx(device.self_ps)
    assert [recorded.kinds[kind]["name"] for kind in columns["kind"][rows]] == [
        device.operations[which].name for which in device.which
    ]
    assert sum(columns["duration"][rows] - columns["inside"][rows]) * 1e-12 == pytest.approx(device.busy_s)


def test_events_of_one_row_do_not_overlap(trace):
    recorded = recorded_events(trace, short_paths(trace))
    assert {lane.type for lane in recorded.lanes} == {"steps", "operations", "thread"}
    for lane in recorded.lanes:
        for row in range(lane.rows):
            here = np.flatnonzero(lane.row == row)
            assert (lane.start_ps[here][1:] >= (lane.start_ps + lane.duration_ps)[here][:-1]).all(), lane.name


def test_threads_have_neither_bookkeeping_nor_what_is_on_a_device(build):
    plane = build.plane("/host:CPU")
    plane.line(
        "worker",
        plane.event("dot.1", 0, 5, hlo_op="dot.1", hlo_module="jit_f", program_id=1, run_id=1),
        plane.event("end: dot.1", 5, 1),
        plane.event("ThreadpoolListener::Record", 7, 1),
        plane.event("outer", 10, 10),
        plane.event("inner", 12, 4),
    )
    plane.line("worker", plane.event("PjitFunction(f)", 0, 3))
    recorded = recorded_events(trace_of([read_space(build.space(plane))]), ShortPaths([], ""))
    threads = [lane for lane in recorded.lanes if lane.type == "thread"]
    assert [(lane.group, lane.name) for lane in threads] == [("host vm", "worker"), ("host vm", "worker (2)")]
    names = [[recorded.kinds[kind]["name"] for kind in lane.kind] for lane in threads]
    assert names == [["outer", "inner"], ["PjitFunction(f)"]]
    assert threads[0].self_ps.tolist() == [6e6, 4e6] and threads[0].row.tolist() == [0, 1]
    assert [recorded.kinds[kind]["category"] for lane in threads for kind in lane.kind] == [
        "annotation",
        "annotation",
        "JAX and its runtime",
    ]


@pytest.mark.parametrize("kind", ["correlation_id", "run_id"])
def test_operations_have_the_event_of_the_host_that_dispatched_them(build, kind):
    host = build.plane("/host:CPU")
    about = {"hlo_module": "jit_f", "program_id": 1}
    operations = [("dot.1", 20, 7), ("add.2", 40, 7), ("dot.1", 60, 8), ("add.2", 80, 9)]
    host.line("python", *(host.event("launch", 10 * key - 65, 5, **{kind: key}) for key in (7, 8)))
    device = build.plane("/device:GPU:0") if kind == "correlation_id" else host
    events = [device.event(name, at, 10, hlo_op=name, **about, **{kind: key}) for name, at, key in operations]
    device.line("Stream #1" if device is not host else "worker", *events)
    recorded = recorded_events(
        trace_of([read_space(build.space(*{id(p): p for p in (host, device)}.values()))]), ShortPaths([], "")
    )
    names, sources = [], recorded.dispatched_by.tolist()
    for lane in recorded.lanes:
        names += [
            (lane.type, recorded.kinds[each]["name"], start)
            for each, start in zip(lane.kind, lane.start_ps, strict=True)
        ]
    found = {names[place][1:]: names[source - 1][2] for place, source in enumerate(sources) if source}
    base = min(start for _, _, start in names)
    at = {
        (name, (start - 5) * 1_000_000 + base): (10 * key - 70) * 1_000_000 + base
        for name, start, key in operations[:3]
    }
    assert found == at


def test_runs_of_a_cpu_have_their_calls_in_order_without_those_before_the_trace(build):
    host, about = build.plane("/host:CPU"), {"hlo_op": "dot.1", "hlo_module": "jit_f", "program_id": 1}
    # The first run was dispatched before the trace; the runtime records a call once more, inside.
    calls = [host.event("PjitFunction(jit(f))", at, 4) for at in (5, 6, 30, 50)]
    host.line("python", *calls, host.event("PjitFunction(jit(g))", 60, 5))
    waits = [host.event("wait", at + 5, 9, run_id=run) for run, at in enumerate((0, 20, 40, 60))]
    host.line("pool", *waits)
    runs = [host.event("dot.1", at, 10, **about, run_id=run) for run, at in enumerate((0, 20, 40, 60))]
    host.line("worker", *runs)
    recorded = recorded_events(trace_of([read_space(build.space(host))]), ShortPaths([], ""))
    start = np.concatenate([lane.start_ps for lane in recorded.lanes]) // 1_000_000
    pairs = [(int(start[row]), int(start[by - 1])) for row, by in enumerate(recorded.dispatched_by.tolist()) if by]
    assert pairs == [(20, 5), (40, 30), (60, 50)]


def test_beyond_the_limit_the_shortest_events_go_those_of_threads_first(trace):
    whole = recorded_events(trace, short_paths(trace))
    operations = sum(len(lane) for lane in whole.lanes if lane.type != "thread")
    total = sum(map(len, whole.lanes))
    some = recorded_events(trace, short_paths(trace), limit=operations + 1)
    assert sum(map(len, some.lanes)) == operations + 1 and some.left_out == total - operations - 1
    longest = max(lane.duration_ps.max() for lane in whole.lanes if lane.type == "thread")
    assert [lane.duration_ps.tolist() for lane in some.lanes if lane.type == "thread"] == [[longest]]
    few = recorded_events(trace, short_paths(trace), limit=10)
    durations = sorted((d for lane in whole.lanes if lane.type != "thread" for d in lane.duration_ps), reverse=True)
    assert sorted((d for lane in few.lanes for d in lane.duration_ps), reverse=True) == durations[:10]


def test_files_are_named_from_the_working_directory_or_from_their_package(tmp_path):
    package = tmp_path / "src" / "mine" / "layers"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    files = ["/home/me/run/train.py", str(package / "mlp.py"), "/opt/other.py", "/home/me/runs/train.py"]
    paths = ShortPaths(files, "/home/me/run/")
    assert [paths.file(file) for file in files] == ["train.py", "mine/layers/mlp.py", "/opt/other.py", files[3]]
    assert paths.text("dot.1 /home/me/run/train.py:12, 3 ms") == "dot.1 train.py:12, 3 ms"
    untouched = "/data/home/me/run/train.py /home/me/run/train.py.bak /home/me/run/other.py"
    assert paths.text(untouched) == untouched
    assert ShortPaths([], "/").text("/a.py") == "/a.py"


def test_a_source_that_changed_is_said_to_have(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("a\nb\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    def note(**about):
        found = sources({"model.py": str(file)}, about)["model.py"]
        assert found["lines"] == file.read_text().splitlines()
        return found["note"]

    assert note(sources={str(file): digest}, started_at="2000-01-01T00:00:00+00:00") == ""
    assert "does not record" in note() and "does not record" in note(started_at="yesterday", sources=3)
    assert note(started_at="2999-01-01T00:00:00+00:00") == ""
    assert "written after" in note(started_at="2000-01-01T00:00:00+00:00")
    file.write_text("a\nc\n")
    assert "changed since" in note(sources={str(file): digest})
    file.write_bytes(b"\xff" * (1 << 20) + b"\n")
    missing, large = sources({"missing.py": "/missing.py", "model.py": str(file)}, {}).values()
    assert missing["lines"] is None and "No such file" in missing["note"]
    assert large["lines"] is None and "too large" in large["note"]


@dataclass(frozen=True)
class Row:
    name: str = ""
    line: str = ""
    device: str = ""
    step_number: int | None = None
    start_s: float | None = None
    duration_s: float | None = None


def test_rows_lead_to_events_by_the_names_of_their_fields(trace):
    paths = short_paths(trace)
    links = Links(recorded_events(trace, paths), paths)
    row = ops(trace).rows[0]
    module, _, name = row.name.partition(": ")
    assert links.address(row, {}) == f"op={module}%3A%20{name}"
    line = ops(trace, by="line").rows[0].name
    assert links.address(Row(line=line), {}) == f"line={paths.text(line).replace('/', '%2F').replace(':', '%3A')}"
    step = trace.steps["CPU:0"][0]
    assert links.address(Row(device="CPU:0", step_number=step.number), {}) == f"device=CPU%3A0&step={step.number}"
    assert links.address(Row(start_s=1e-6, duration_s=2e-6), {"start_s": 1e-3}) == "s=1001000000-1003000000"
    assert links.address(Row(name=module), {}) == f"module={module}"
    assert links.address(Row(name="nothing of that name", line="nowhere.py:1"), {}) is None
    assert links.address(object(), {}) is None


def test_the_script_is_built_from_its_sources_small_and_makes_no_markup():
    script = (PAGE / "page.js").read_text()
    digest = hashlib.sha256()
    for file in sorted((WEB / "src").iterdir()):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    assert digest.hexdigest() in script.splitlines()[0], "run `npm run build` in packages/profile/web"
    assert len(script) + len((PAGE / "page.css").read_text()) < 400_000
    assert "</script" not in script and "<!--" not in script
    for file in (WEB / "src").iterdir():
        assert not {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"} & set(file.read_text().split("."))
