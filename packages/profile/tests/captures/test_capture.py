"""Captures hold what ran in them, are written off-thread, and leave the profiler free."""

import hashlib
import json
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.captures.capture import Capture, _missing_programs
from stack_profile.traces.trace import load_trace


@jax.jit
def work(x):
    with jax.named_scope("mlp"):
        return jax.lax.fori_loop(0, 20, lambda _, carry: jnp.tanh(carry @ carry), x)


@pytest.fixture(scope="module")
def x():
    return work(jnp.ones((64, 64))).block_until_ready()


def test_a_block_is_captured_to_the_end_of_what_it_dispatched(tmp_path, x):
    with stack_profile.capture(tmp_path) as captured:
        for _ in range(5):
            x = work(x)
        assert repr(captured) == f"<Capture {captured.path}: running>"
    path = captured.wait()
    assert repr(captured) == f"<Capture {path}: written>"
    assert repr(Capture(tmp_path)) == f"<Capture {tmp_path}: not started>"
    trace = load_trace(tmp_path)
    (ops,) = trace.devices
    assert repr(trace).startswith(f"<Trace {path}: {len(ops):,} operations on 1 devices, ")
    assert trace.source == str(path) and not trace.problems
    assert len(trace.steps[ops.device]) == 5
    products = [
        operation for operation in ops.operations if operation.opcode in ("dot", "fusion") and operation.instruction
    ]
    assert {operation.instruction.source().file for operation in products} == {__file__}
    assert "mlp" in {operation.instruction.layer for operation in products}
    assert not list(tmp_path.rglob("*.partial"))


def test_the_capture_says_where_it_was_taken(tmp_path, x):
    with stack_profile.capture(tmp_path, name="mine") as captured:
        work(x)
    about = load_trace(captured.wait()).about
    assert captured.path.parent == tmp_path / "plugins" / "profile" / "mine"
    assert (about["platform"], about["devices"], about["jax"]) == ("cpu", jax.device_count(), jax.__version__)
    assert about["bytes"] == captured.path.stat().st_size and about["stop_s"] > 0
    assert about["directory"] == str(Path.cwd())
    assert about["sources"][__file__] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert not any("site-packages" in file or "/stack_profile/" in file for file in about["sources"])
    assert json.loads(json.dumps(about)) == about


def test_each_call_of_a_decorated_function_is_a_capture(tmp_path, x):
    @stack_profile.capture(tmp_path)
    def step():
        return work(x)

    step()
    step()
    _join_writers()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 2


def test_there_is_one_capture_at_a_time_and_the_first_goes_on(tmp_path, x):
    with stack_profile.capture(tmp_path) as captured:
        with pytest.raises(stack_profile.CaptureError, match="Another capture"), stack_profile.capture(tmp_path):
            pass
        work(x).block_until_ready()
    captured.wait()
    assert load_trace(tmp_path).devices


def test_jaxs_own_capture_is_respected(tmp_path):
    jax.profiler.start_trace(str(tmp_path / "jax"))
    try:
        with pytest.raises(stack_profile.CaptureError, match="stop_trace"), stack_profile.capture(tmp_path):
            pass
    finally:
        jax.profiler.stop_trace()


def test_after_an_error_in_the_block_its_trace_is_there_and_the_profiler_free(tmp_path, x):
    captured = stack_profile.capture(tmp_path)
    with pytest.raises(KeyError), captured:
        work(x).block_until_ready()
        raise KeyError("mine")
    assert load_trace(captured.wait()).devices
    with stack_profile.capture(tmp_path) as second:
        pass
    assert second.wait() != captured.path


def test_a_directory_that_cannot_be_made_is_refused_and_the_profiler_stays_free(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        with (
            pytest.raises(stack_profile.CaptureError, match="cannot be made"),
            stack_profile.capture(tmp_path / "file"),
        ):
            pass


def test_what_cannot_be_written_is_told(tmp_path, x, recwarn):
    captured = stack_profile.capture(tmp_path).start()
    captured.path.parent.rmdir()
    captured.stop()
    with pytest.raises(stack_profile.CaptureError, match="cannot be written"):
        captured.wait()
    assert [warning.category for warning in recwarn] == [stack_profile.CaptureWarning]


def test_the_end_of_the_writing_is_reported_after_any_failure(tmp_path, monkeypatch):
    failures, written = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_type))
    monkeypatch.setattr(Capture, "_write_files", lambda self, data: sys.exit())
    Capture(tmp_path).start().stop(on_written=written.set)
    _join_writers()
    assert written.is_set() and failures == [SystemExit]


def test_waiting_for_a_capture_that_runs_is_refused(tmp_path):
    with stack_profile.capture(tmp_path) as captured, pytest.raises(stack_profile.CaptureError, match="has not ended"):
        captured.wait()
    captured.wait()


def test_programs_that_the_trace_lacks_are_written_beside_it(tmp_path, x):
    with stack_profile.capture(tmp_path) as captured:
        work(x).block_until_ready()
    path = captured.wait()
    name = next(operation.module for operation in load_trace(path).devices[0].operations)
    path.write_bytes(path.read_bytes().replace(b"/host:metadata", b"/host:forgotten"[:14]))
    assert load_trace(path).devices[0].operations[0].instruction is None

    captured._write_files(path.read_bytes())
    assert list(path.parent.glob(f"*.{name}(*).hlo.pb"))
    assert load_trace(path).devices[0].operations[0].instruction.frames


def test_programs_that_the_trace_numbers_differently_are_not_written_again(build):
    """As on GPUs; of two programs with one name and schedule, the trace may lack one."""
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    executable = compiled.runtime_executable()
    name = executable.hlo_modules()[0].name
    stored = build.metadata_plane([(name, 4718, build.hlo_proto(compiled))])
    ran = build.plane("/device:GPU:0")
    ran.line("Stream #1", ran.event("kernel", 0, 1, hlo_module=name))
    data = build.space(stored, ran)
    assert not list(_missing_programs(data, [executable]))
    assert len(list(_missing_programs(data, [executable] * 2))) == 1


def _join_writers():
    for thread in threading.enumerate():
        if thread.name == "capture-writer":
            thread.join()
