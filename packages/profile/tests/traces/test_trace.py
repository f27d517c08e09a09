"""Operations of CPUs, GPUs and TPUs are joined with their programs."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.cli import main
from stack_profile.analyses.compile import compilations
from stack_profile.analyses.memory import memory
from stack_profile.analyses.ops import ops
from stack_profile.analyses.overview import overview
from stack_profile.errors import TraceError
from stack_profile.traces import size_limit
from stack_profile.traces.hlo import program_of
from stack_profile.traces.size_limit import check_size
from stack_profile.traces.trace import load_trace, trace_files, trace_of
from stack_profile.traces.xplane import read_space

MICRO = 1_000_000


@pytest.fixture(scope="module")
def programs(build):
    def scanned(x):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ carry), None), x, None, length=3)[0]

    compiled = jax.jit(scanned).lower(jax.ShapeDtypeStruct((32, 32), jnp.float32)).compile()
    return build.metadata_plane([("jit_scanned", 7, build.hlo_proto(compiled))])


@pytest.fixture(scope="module")
def names(build, programs):
    (program,) = trace_of([read_space(build.space(programs))]).programs
    by_opcode = {each.opcode: each.name for each in program.instructions.values() if not each.fused}
    inside = [each.name for each in program.instructions.values() if not each.fused and each.opcode == "fusion"]
    return by_opcode["while"], inside[0]


def cpu_plane(build, loop, inner, *, runs=2):
    """Each run is a loop of 100 us that is started in 5; in it an operation of 10 + 20 us on another thread."""
    plane = build.plane("/host:CPU")
    both = {"hlo_module": "jit_scanned", "program_id": 7, "device_ordinal": 0}
    starts, works, ends = [], [], []
    for run in range(runs):
        at = 150 * run
        starts.append(plane.event(loop, at, 5, hlo_op=loop, run_id=run, _p=10 * run, **both))
        works.append(plane.event(inner, at + 20, 10, hlo_op=inner, run_id=run, _p=10 * run + 1, **both))
        ends += [
            plane.event(f"end: {inner}", at + 50, 1, _c=10 * run + 1),
            plane.event(f"end: {loop}", at + 100, 1, _c=10 * run),
        ]
    plane.line("main", *starts)
    plane.line("worker", *works, plane.event("unrelated", 0, 500), *ends)
    return plane


def test_on_cpus_work_ends_at_its_mark_and_loops_have_what_their_bodies_leave(build, programs, names):
    loop, inner = names
    trace = trace_of([read_space(build.space(programs, cpu_plane(build, loop, inner)))])
    (ops,) = trace.devices
    assert (ops.device, len(ops), trace.problems) == ("CPU:0", 4, ())
    assert ops.union_ps == 200 * MICRO
    sums = {operation.name: total for operation, total in zip(ops.operations, ops.sums(ops.self_ps), strict=True)}
    assert sums == {loop: 140 * MICRO, inner: 60 * MICRO}
    assert all(operation.instruction.name == operation.name for operation in ops.operations)
    first, second = trace.steps["CPU:0"]
    assert (first.program, first.duration_ps, second.duration_ps) == ("jit_scanned", 150 * MICRO, 100 * MICRO)


def test_streams_of_a_gpu_overlap(build, programs, names):
    """What is of no operation has the time in which none runs. XLA writes what a kernel is in before its name."""
    _, inner = names
    plane = build.plane("/device:GPU:1")
    for stream in (1, 2):
        ops = plane.event("kernel", 10 * stream, 20, hlo_op=f"call::{inner}", hlo_module="jit_scanned", program_id=7)
        plane.line(f"Stream #{stream}(Compute)", ops, plane.event("MemcpyH2D", 0, 50))
    trace = trace_of([read_space(build.space(programs, plane))])
    (ops,) = trace.devices
    copy, kernel = sorted(ops.operations, key=lambda operation: operation.program is not None)
    assert (ops.device, copy.name, copy.program, kernel.instruction.name) == ("GPU:1", "MemcpyH2D", None, inner)
    sums = {operation.name: total for operation, total in zip(ops.operations, ops.sums(ops.self_ps), strict=True)}
    assert sums == {"MemcpyH2D": 20 * MICRO, inner: 30 * MICRO}


def gpu_plane(build, kernels):
    """A kernel of 10 us every 10 us."""
    plane = build.plane("/device:GPU:0")
    stats = {"hlo_module": "jit_scanned", "program_id": 7}
    events = [plane.event("kernel", 10 * place, 10, hlo_op=name, **stats) for place, name in enumerate(kernels)]
    plane.line("Stream #1(Compute)", *events)
    return plane


def test_steps_of_a_gpu_begin_with_the_first_operation_outside_loops(build, programs, names):
    (program,) = trace_of([read_space(build.space(programs))]).programs
    entry = next(each.name for each in program.instructions.values() if each.computation == program.entry)
    _, inner = names  # in the loop
    inside = (each.name for each in program.instructions.values() if each.computation != program.entry)
    other = next(name for name in inside if name != inner)
    kernels = [other, entry, entry, other, other, entry, entry, other, inner, entry, entry, other, other]
    trace = trace_of([read_space(build.space(programs, gpu_plane(build, kernels)))])
    assert trace.devices[0].run.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [step.duration_ps for step in trace.steps["GPU:0"]] == [50 * MICRO, 40 * MICRO, 40 * MICRO]


def test_steps_of_a_gpu_without_hlo_begin_with_what_runs_the_fewest_times(build):
    trace = trace_of([read_space(build.space(gpu_plane(build, ["a", "b", "c", "b"] * 3)))])
    assert [step.duration_ps for step in trace.steps["GPU:0"]] == [40 * MICRO] * 3


def test_operations_of_a_tpu_have_a_line_of_their_own_and_share_their_program(build, programs, names):
    loop, inner = names
    plane = build.plane("/device:TPU:0")
    plane.line("Steps", plane.event("1", 0, 500))
    plane.line("XLA Ops", plane.event(f"%{loop}", 0, 50), plane.event(f"%{inner}", 10, 30))
    for name in (loop, inner):
        plane.metadata(f"%{name}", program_id=7)
    (ops,) = trace_of([read_space(build.space(programs, plane))]).devices
    assert {operation.instruction.name for operation in ops.operations} == {loop, inner}
    assert sorted(ops.self_ps.tolist()) == [20 * MICRO, 30 * MICRO]


def test_the_programs_of_a_tpu_have_keys_of_64_bits(build, programs, names):
    """Its operations hold them as signed numbers, the table of programs as unsigned ones."""
    loop, _ = names
    key = (1 << 63) + 5
    proto = read_space(build.space(programs)).planes[0].event_stats(1)["Hlo Proto"]
    metadata = build.plane("/host:metadata", events={f"jit_scanned({key})": key})
    metadata.metadata(f"jit_scanned({key})", **{"Hlo Proto": proto})
    plane = build.plane("/device:TPU:0")
    plane.line("XLA Ops", plane.event(loop, 0, 50))
    plane.metadata(loop, program_id=key - (1 << 64))
    (ops,) = trace_of([read_space(build.space(metadata, plane))]).devices
    assert ops.operations[0].instruction.name == loop


def test_the_clock_of_a_tpu_counts_where_it_is_there(build):
    """Two runs of 20 us, which on the host's clock took 20 and 29."""
    plane = build.plane("/device:TPU:0")
    plane.line("XLA Modules", plane.event("jit_f(7)", 100, 21), plane.event("jit_f(7)", 121, 30))
    own = [{"device_offset_ps": at * MICRO, "device_duration_ps": 20 * MICRO} for at in (40, 60)]
    plane.line("XLA Ops", plane.event("dot.1", 100, 20, **own[0]), plane.event("dot.1", 121, 29, **own[1]))
    plane.metadata("dot.1", program_id=7)
    (ops,) = trace_of([read_space(build.space(plane))]).devices
    assert ops.self_ps.tolist() == [20 * MICRO, 20 * MICRO]
    assert (ops.end_ps - ops.start_ps[0]).tolist() == [20 * MICRO, 40 * MICRO]
    assert ops.run.tolist() == [0, 1]


def test_without_hlo_operations_have_times_and_no_source(build, names):
    loop, inner = names
    (ops,) = trace_of([read_space(build.space(cpu_plane(build, loop, inner)))]).devices
    assert [operation.instruction for operation in ops.operations] == [None, None]
    assert ops.union_ps == 200 * MICRO
    assert sorted(ops.sums(ops.self_ps)) == [60 * MICRO, 140 * MICRO]  # by its name it is a loop


def test_a_damaged_program_is_a_problem_and_the_rest_is_there(build, names):
    loop, inner = names
    damaged = build.metadata_plane([("jit_scanned", 7, b"\x0b")])
    trace = trace_of([read_space(build.space(damaged, cpu_plane(build, loop, inner)))])
    assert len(trace.devices) == 1 and "program 7 is damaged" in trace.problems[0]


@pytest.fixture(scope="module")
def whole(build, names):
    """A small trace with a program and its buffers, a CPU, a GPU and a TPU."""
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    programs = build.metadata_plane([("jit_scanned", 7, program_of(compiled).proto)])
    tpu = build.plane("/device:TPU:0")
    tpu.line("XLA Modules", tpu.event("jit_scanned(7)", 0, 500))
    tpu.line("XLA Ops", *(tpu.event(name, 0, 50, device_offset_ps=0, device_duration_ps=1) for name in names))
    return build.space(cpu_plane(build, *names), gpu_plane(build, names), tpu, programs)


CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255)), max_size=8
)


@given(changes=CHANGES, cut=st.integers(0, 10**6) | st.none())
def test_whatever_is_damaged_there_is_an_answer_or_an_error_that_says_so(whole, changes, cut):
    data = bytearray(whole if cut is None else whole[: cut % len(whole)])
    for place, value in changes if data else ():
        data[place % len(data)] = value
    try:
        trace = trace_of([read_space(bytes(data))])
        for analysis in (ops, overview, compilations, memory):
            answer = analysis(trace)
            assert set(trace.problems) <= set(answer.notes)
    except TraceError:
        pass


def test_traces_of_several_processes_merge(build, programs, names):
    spaces = [read_space(build.space(programs, cpu_plane(build, *names), host=host)) for host in ("a", "b")]
    assert [ops.device for ops in trace_of(spaces).devices] == ["a:CPU:0", "b:CPU:0"]


def test_the_newest_capture_under_a_directory_is_read(build, programs, names, tmp_path):
    content = build.space(programs, cpu_plane(build, *names))
    for when in ("2026_01_01", "2026_01_02"):
        folder = tmp_path / "plugins" / "profile" / when
        folder.mkdir(parents=True)
        (folder / "vm.xplane.pb").write_bytes(content)
    assert trace_files(tmp_path) == (folder / "vm.xplane.pb",)
    assert load_trace(tmp_path).source == str(folder / "vm.xplane.pb")
    assert len(load_trace(folder / "vm.xplane.pb").devices) == 1


def test_where_there_is_no_trace_the_message_says_how_to_make_one(tmp_path):
    with pytest.raises(TraceError, match="stack profile run"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match="does not exist"):
        load_trace(tmp_path / "nothing")


def test_a_capture_that_is_deleted_while_it_is_read_is_named(build, programs, names, tmp_path, monkeypatch):
    (tmp_path / "vm.xplane.pb").write_bytes(build.space(programs, cpu_plane(build, *names)))
    (tmp_path / "vm.jit_step(7).hlo.pb").symlink_to("nothing")  # listed, and cannot be read
    with pytest.raises(TraceError, match="was deleted while it was read"):
        load_trace(tmp_path)
    monkeypatch.setattr("stack_profile.traces.trace.capture_folders", lambda path: (path / "nothing",))
    with pytest.raises(TraceError, match="was deleted while it was read"):
        load_trace(tmp_path)


@pytest.fixture
def large(tmp_path):
    """A file of 3 GB, which the file system stores as a hole, and an equally named small one."""
    with (tmp_path / "large.xplane.pb").open("wb") as file:
        file.truncate(3 * 10**9)
    return tmp_path / "large.xplane.pb"


def test_a_trace_that_does_not_fit_the_memory_is_refused_with_its_size_and_a_remedy(large, capsys, monkeypatch):
    monkeypatch.setattr(size_limit, "available_memory_bytes", lambda: 4 * 10**9)
    with pytest.raises(SystemExit) as end:
        main(["profile", "ops", str(large)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and repr(str(large)) in said
    assert "2.79 GiB" in said and "3.73 GiB are free" in said and "--duration-s" in said


def test_the_limit_is_of_all_files_and_never_of_small_ones(large, tmp_path):
    small = tmp_path / "small.xplane.pb"
    small.write_bytes(b"")
    check_size([small], free_bytes=1)
    check_size([large, small, tmp_path / "missing"], free_bytes=10**11)
    with pytest.raises(TraceError, match="large"):
        check_size([tmp_path / "missing", small, large], free_bytes=10**9)
