"""The same trace in XProf: its tables for accelerators are ours, and what it leaves empty for CPUs we fill.

XProf's tables of operations are empty for a CPU. So a capture of one is written again as that of a GPU, whose kernels
follow each other on a stream, and of a TPU, where loops span what they run; the table of operations, which is what
both tools make of it, has to be the same.
"""

import collections
import json
import lzma
import subprocess
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_profile.analyses.memory import memory
from stack_profile.analyses.ops import ops
from stack_profile.analyses.overview import overview
from stack_profile.analyses.roofline import roofline
from stack_profile.traces.trace import load_trace

pytestmark = pytest.mark.slow  # installs XProf

H100 = Path(__file__).parents[1] / "packages" / "profile" / "tests" / "h100"
XPROF = "xprof>=2.24,<2.25"
# Runs in XProf's environment: what each of the named tools makes of a trace, with options for those that need some.
CONVERT = """
import json, sys
from xprof.convert import raw_to_tool_data as convert
trace, tools = sys.argv[1], json.loads(sys.argv[2])
convert.xspace_to_tool_names([trace])  # writes the programs beside the trace, where other tools look for them
for tool, options in tools.items():
    answer = convert.xspace_to_tool_data([trace], tool, {"use_saved_result": False, **options})[0]
    tools[tool] = json.loads(answer) if answer else None
print(json.dumps(tools))
"""


@pytest.fixture(scope="session")
def xprof(peer_python):
    """Converts a trace: from its path and the names of tools to what each answers."""
    python = peer_python(XPROF)

    def convert(trace, **tools):
        command = [python, "-c", CONVERT, trace, json.dumps(tools)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return convert


def varint(value):
    value %= 1 << 64
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def message(*parts):
    """The wire form of (number, integer or bytes) pairs."""
    forms = []
    for number, value in parts:
        if isinstance(value, int):
            forms.append(varint(number << 3) + varint(value))
        else:
            forms.append(varint(number << 3 | 2) + varint(len(value)) + value)
    return b"".join(forms)


class Writer:
    """Writes a plane whose operations are those of `device`, at the times of `rows`: (row, start_ps, end_ps)."""

    STATS: ClassVar = {"hlo_op": 1, "hlo_module": 2, "program_id": 3, "Hlo Proto": 4, "symbol_id": 5}

    def __init__(self, device):
        self._device = device
        self._keys = {name: 100 + place for place, name in enumerate(dict.fromkeys(self._texts()))}

    def _texts(self):
        for operation in self._device.operations:
            yield from (operation.name, operation.module)

    def _table(self):
        known = {**self.STATS, **self._keys}
        return [(5, message((1, key), (2, message((1, key), (2, name.encode()))))) for name, key in known.items()]

    def gpu(self, rows):
        """A stream whose events say which operation they are of."""
        line = message((1, 7), (2, b"Stream #7(Compute)"), (3, 1000), *((4, self._event(*row)) for row in rows))
        kernel = (4, message((1, 1), (2, message((1, 1), (2, b"kernel")))))
        return message((1, 1), (2, b"/device:GPU:0"), (3, line), kernel, *self._table())

    def tpu(self, rows):
        """A line of operations, whose events are named by them."""
        modules = message((1, 1), (2, b"XLA Modules"), (3, 1000))
        line = message((1, 2), (2, b"XLA Ops"), (3, 1000), *((4, self._named(*row)) for row in rows))
        kinds = [
            (4, message((1, key), (2, message(*self._shared(operation, key)))))
            for key, operation in enumerate(self._device.operations, 1)
        ]
        return message((1, 1), (2, b"/device:TPU:0"), (3, modules), (3, line), *kinds, *self._table())

    def programs(self):
        found = {operation.program.key: operation.program for operation in self._device.operations}
        kinds = []
        for key, program in found.items():
            stat = (5, message((1, self.STATS["Hlo Proto"]), (6, program.proto)))
            content = message((1, key), (2, f"{program.name}({key})".encode()), stat)
            kinds.append((4, message((1, key), (2, content))))
        return message((1, 9), (2, b"/host:metadata"), *kinds, *self._table())

    def _event(self, row, start, end):
        operation = self._device.operations[self._device.which[row]]
        stats = {"hlo_op": (7, self._keys[operation.name]), "hlo_module": (7, self._keys[operation.module])}
        stats["program_id"] = (3, operation.program_key)
        parts = [(4, message((1, self.STATS[name]), value)) for name, value in stats.items()]
        return message((1, 1), (2, start), (3, end - start), *parts)

    def _named(self, row, start, end):
        return message((1, int(self._device.which[row]) + 1), (2, start), (3, end - start))

    def _shared(self, operation, key):
        """What the events of an operation of a TPU share: its names, its program, its number there."""
        stats = {"program_id": operation.program_key, "symbol_id": key}
        parts = [(5, message((1, self.STATS[name]), (3, value))) for name, value in stats.items()]
        return [(1, key), (2, f"%{operation.name} = ...".encode()), (4, operation.name.encode()), *parts]


def one_after_the_other(device, *, loops):
    """(row, start, end) of operations, each cut to begin when the one before has ended; with the loops if asked."""
    reached, open_ends, rows = 0, [], []
    columns = (device.which.tolist(), device.start_ps.tolist(), device.end_ps.tolist())
    for row, (which, began, ended) in enumerate(zip(*columns, strict=True)):
        start = max(began, reached)
        open_ends = [each for each in open_ends if each > start]
        end = min([ended, *open_ends])
        if end <= start:
            continue
        if not device.operations[which].is_container:
            rows.append((row, start, end))
            reached = end
        elif loops:
            rows.append((row, start, end))
            open_ends.append(end)
    return rows


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A capture of three steps with a loop, products and elementwise operations."""

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)
        return jnp.mean(jnp.sort(x) ** 2)

    step = jax.jit(lambda weights, x: weights - 0.1 * jax.grad(loss)(weights, x))
    x, weights = jnp.ones((32, 64)), jnp.ones((5, 64, 64)) * 0.01
    weights = step(weights, x).block_until_ready()
    with stack_profile.capture(tmp_path_factory.mktemp("capture")) as capture:
        for _ in range(3):
            weights = step(weights, x)
    return capture.wait()


def written(folder, plane, programs):
    path = folder / "host.xplane.pb"
    path.write_bytes(message((1, plane), (1, programs), (4, b"host")))
    return path


def rows_of_table(answer):
    names = [column["id"] for column in answer["cols"]]
    return [dict(zip(names, [cell["v"] for cell in row["c"]], strict=True)) for row in answer["rows"]]


def table_of(answer):
    """The table of XProf's hlo_stats by operation."""
    return {row["hlo_op_name"]: row for row in rows_of_table(answer)}


def compare(trace, theirs):
    """Our table of operations with XProf's: occurrences, total and self time within 0.1%, and who is in it."""
    (device,) = trace.devices
    total_ps = device.sums(device.end_ps - device.start_ps)
    ours = {operation.name: (self_s, count) for operation, self_s, count in device.totals()}
    assert set(ours) == set(theirs)
    for (name, (self_s, count)), all_ps in zip(ours.items(), total_ps.tolist(), strict=True):
        assert count == theirs[name]["occurrences"]
        assert all_ps * 1e-6 == pytest.approx(theirs[name]["total_time"], rel=1e-3), name
        assert self_s * 1e6 == pytest.approx(theirs[name]["total_self_time"], rel=1e-3, abs=1e-3), name
    return device


@pytest.fixture(scope="module")
def cpu(captured):
    """The CPU of the capture."""
    (device,) = load_trace(captured).devices
    return device


def test_the_operations_of_a_gpu_are_those_of_xprof(cpu, xprof, tmp_path):
    writer = Writer(cpu)
    path = written(tmp_path, writer.gpu(one_after_the_other(cpu, loops=False)), writer.programs())
    theirs = table_of(xprof(path, hlo_stats={})["hlo_stats"])
    trace = load_trace(path)
    for operation in compare(trace, theirs).operations:
        kind = theirs[operation.name]["category"]
        assert operation.opcode in {"data formatting": ("copy", "transpose")}.get(kind, (kind.split()[-1],))
    rows = roofline(trace).rows
    assert sum(row.category == "matrix product" for row in rows) >= 3
    for row in rows:
        self_us = theirs[row.name]["total_self_time"]
        assert row.traffic_bytes == pytest.approx(theirs[row.name]["measured_memory_bw"] * 2**30 * self_us / 1e6)
        if row.flops:  # XProf counts those of elementwise operations too
            assert row.flops == pytest.approx(theirs[row.name]["model_flop_rate"] * 1e3 * self_us, rel=1e-3)


@pytest.mark.parametrize(("name", "joined"), [("train", 0), ("decode", 36)])
def test_the_times_of_an_h100_are_those_of_xprof(name, joined, xprof, tmp_path):
    """XProf joins no kernel of a CUDA graph with its operation, and counts loops for copies of their conditions."""
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(lzma.decompress((H100 / f"{name}.xplane.pb.xz").read_bytes()))
    answers = xprof(path, kernel_stats={}, hlo_stats={})
    (device,) = load_trace(path).devices
    totals_us = (device.sums(device.end_ps - device.start_ps) * 1e-6).tolist()
    kernels, operations = (collections.defaultdict(lambda: np.zeros(2)) for _ in range(2))
    for (operation, _, count), total_us in zip(device.totals(), totals_us, strict=True):
        kernels[operation.kernel or operation.name] += count, total_us
        operations[operation.name, str(operation.program_key)] += count, total_us
    theirs = collections.defaultdict(lambda: np.zeros(2))
    for row in rows_of_table(answers["kernel_stats"]):
        theirs[row["kernel_name"]] += row["occurrences"], row["total_duration_us"]
    assert set(kernels) - set(theirs) == {"MemcpyH2D", "MemcpyD2H"} and set(theirs) <= set(kernels)
    for kernel, expected in theirs.items():
        np.testing.assert_allclose(kernels[kernel], expected, rtol=1e-3, err_msg=kernel)
    found = rows_of_table(answers["hlo_stats"])
    assert len(found) == joined
    for row in found:
        place = row["hlo_op_name"], str(row["program_id"])
        np.testing.assert_allclose(operations[place], (row["occurrences"], row["total_time"]), rtol=1e-3)


def test_the_operations_of_a_tpu_are_those_of_xprof(cpu, xprof, tmp_path):
    writer = Writer(cpu)
    path = written(tmp_path, writer.tpu(one_after_the_other(cpu, loops=True)), writer.programs())
    device = compare(load_trace(path), table_of(xprof(path, hlo_stats={})["hlo_stats"]))
    assert any(operation.is_container for operation in device.operations)


def rows_of(tables):
    """How many rows XProf's tables have."""
    return sum(len(table.get("rows", ())) for table in (tables if isinstance(tables, list) else [tables]))


def test_what_xprof_leaves_empty_for_a_cpu_is_filled(captured, xprof, tmp_path):
    path = tmp_path / captured.name  # XProf writes beside what it reads
    path.write_bytes(captured.read_bytes())
    tools = ("overview_page", "framework_op_stats", "hlo_stats", "op_profile", "roofline_model", "memory_profile")
    theirs = xprof(path, **{tool: {} for tool in tools})
    assert (
        rows_of(theirs["overview_page"][:2]) == rows_of(theirs["hlo_stats"]) == rows_of(theirs["roofline_model"]) == 0
    )
    assert rows_of(theirs["framework_op_stats"]) == 1, "the row IDLE"
    assert theirs["op_profile"]["byProgram"]["children"] == []
    assert theirs["memory_profile"]["memoryProfilePerAllocator"] == {}
    trace = load_trace(captured)
    filled = (overview(trace), ops(trace, by="scope"), ops(trace), roofline(trace, chip="v5p"), memory(trace))
    for answer in filled:
        assert answer.rows and not any("No data" in note for note in answer.notes), answer.name


def test_the_memory_of_a_program_is_that_of_xprof(captured, xprof, tmp_path):
    path = tmp_path / captured.name
    path.write_bytes(captured.read_bytes())
    trace = load_trace(captured)
    facts = memory(trace).facts
    (key,) = [program.key for program in trace.programs if program.name == facts["program"]]
    theirs = xprof(path, memory_viewer={"module_name": f"{facts['program']}({key})"})["memory_viewer"]
    assert facts["total_bytes"] == pytest.approx(theirs["totalBufferAllocationMib"] * 2**20, rel=1e-3)
    assert facts["peak_live_bytes"] == pytest.approx(
        (theirs["peakHeapMib"] - theirs["indefiniteBufferAllocationMib"]) * 2**20, rel=1e-3
    )
