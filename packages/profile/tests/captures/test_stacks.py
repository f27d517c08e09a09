"""A capture samples the Python stacks of all threads on the trace's clock, and records garbage collections."""

import contextlib
import gc
import hashlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_profile.analyses.advice import advice
from stack_profile.analyses.idle import idle
from stack_profile.analyses.input_pipeline import input_pipeline
from stack_profile.analyses.overview import overview
from stack_profile.report.events import recorded_events
from stack_profile.traces.host_stacks import thread_of
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace


def read_batch():
    time.sleep(0.1)


def count_words(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def line_in(function, offset):
    """The line `offset` lines below the `def` of a function, as analyses name it."""
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


@contextlib.contextmanager
def waiting_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="waits")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A loop that waits for its input, and one that counts words between its steps, in one thread of two."""
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jax.block_until_ready(step(jnp.ones((64, 64))))
    folder = tmp_path_factory.mktemp("sampled")
    with waiting_thread(), stack_profile.capture(folder / "input", stacks_hz=1000.0) as captured:
        for _ in range(12):
            with jax.profiler.TraceAnnotation("next_batch"):
                read_batch()
            x = jax.block_until_ready(step(x))
    captured.wait()
    with stack_profile.capture(folder / "host", stacks_hz=1000.0) as captured:
        for _ in range(12):
            x = jax.block_until_ready(step(x))
            count_words(0.06)
        gc.collect()
    captured.wait()
    return {name: load_trace(folder / name) for name in ("input", "host")}


def test_an_idle_device_has_the_line_that_kept_it(sampled):
    row = idle(sampled["host"]).rows[0]
    assert row.host_line in [line_in(count_words, offset) for offset in (2, 3)], row
    assert row.samples > 5 and row.host_line_samples_share > 0.3
    (advised,) = (row for row in advice(sampled["host"]).rows if row.cause == "host-bound steps")
    assert advised.line in [line_in(count_words, offset) for offset in (2, 3)]


def test_a_slow_input_stage_has_the_line_that_kept_it(sampled):
    (row,) = (row for row in input_pipeline(sampled["input"]).rows if row.stage == "next_batch")
    assert row.host_line == line_in(read_batch, 1)
    (advised,) = (row for row in advice(sampled["input"]).rows if row.cause == "slow input")
    assert advised.line == line_in(read_batch, 1)


def test_samples_are_on_the_clock_of_the_trace(sampled):
    trace = sampled["input"]
    (stacks,), (space,) = trace.host_stacks, trace.spaces
    (host,) = (plane for plane in space.planes if plane.name == "/host:CPU")
    (key,) = (key for key, name in host.event_names.items() if name == "next_batch")
    line = next(line for line in host.lines if key in line.events.metadata)
    assert stacks.threads[thread_of(line, stacks.threads)].name == threading.main_thread().name
    start = line.events.start_ps(trace.base_ns)[line.events.metadata == key]
    end = start + line.events.duration_ps[line.events.metadata == key]
    thread = stacks.calling(space)
    inside = stacks.lines_during(thread, np.stack([start, end], axis=1))
    outside = stacks.lines_during(thread, np.stack([end[:-1], start[1:]], axis=1))
    # At most one sample per call is just before or after the annotation.
    assert inside[line_in(read_batch, 1)] >= 0.8 * inside.total() > 5
    assert outside[line_in(read_batch, 1)] == 0


def test_lanes_have_the_stacks_of_each_thread_and_collections(sampled):
    trace = sampled["host"]
    recorded = recorded_events(trace, short_paths(trace))
    lanes = {lane.name: lane for lane in recorded.lanes}
    main, collections = lanes["MainThread stacks"], lanes["garbage collection"]
    kinds = [recorded.kinds[kind] for kind in main.kind]
    assert "count_words" in {kind["name"] for kind in kinds}
    assert not any(lane.name.startswith("capture-stacks") for lane in recorded.lanes)
    for row in range(main.rows):
        here = main.row == row
        assert (main.start_ps[here][1:] >= (main.start_ps + main.duration_ps)[here][:-1]).all()
    (stacks,) = trace.host_stacks
    whole_ps = int((main.start_ps + main.duration_ps).max() - main.start_ps.min())
    assert float(main.self_ps.sum()) == pytest.approx(whole_ps), "the thread has a stack at each sample"
    assert {recorded.kinds[kind]["name"] for kind in collections.kind} >= {"generation 2"}
    assert "MainThread" in lanes and "waits stacks" not in lanes
    assert whole_ps >= int(stacks.tick_ps[-1] - stacks.tick_ps[0])


def hold_lock(end):
    """Holds the interpreter lock in calls of C for tens of milliseconds each."""
    while time.perf_counter() < end:
        sum(range(3_000_000))


def release_lock(end):
    """Keeps a processor as busy, without the lock."""
    data = bytes(1 << 24)
    while time.perf_counter() < end:
        hashlib.sha256(data)


@pytest.fixture(scope="module")
def contended(tmp_path_factory):
    """Captures of a second thread's work by its function."""
    folder, found = tmp_path_factory.mktemp("contended"), {}
    for work in (hold_lock, release_lock):
        with stack_profile.capture(folder / work.__name__, stacks_hz=200.0) as captured:
            thread = threading.Thread(target=work, args=(time.perf_counter() + 1.0,))
            thread.start()
            thread.join()
        captured.wait()
        found[work] = load_trace(folder / work.__name__)
    return found


def test_a_thread_that_holds_the_lock_makes_the_sampler_wait_and_one_that_computes_without_it_does_not(contended):
    facts = {work: overview(trace).facts for work, trace in contended.items()}
    assert facts[hold_lock]["longest_interpreter_wait_s"] > 0.01
    assert facts[hold_lock]["mean_interpreter_wait_s"] > 10 * facts[release_lock]["mean_interpreter_wait_s"] >= 0
    assert all(each["mean_processor_wait_s"] is not None for each in facts.values()) or sys.platform != "linux"


def test_long_waits_are_a_lane_that_ends_where_the_samples_are(contended):
    trace = contended[hold_lock]
    recorded = recorded_events(trace, short_paths(trace))
    (lane,) = (lane for lane in recorded.lanes if lane.name == "waits for the interpreter")
    (stacks,) = trace.host_stacks
    assert set((lane.start_ps + lane.duration_ps).tolist()) <= set(stacks.tick_ps.tolist())
    waits_ps = stacks.lateness.interpreter_ps
    names = np.array([recorded.kinds[kind]["name"] for kind in lane.kind])
    (locks,) = (lane.keep(names == name) for name in set(names) if name.startswith("waits for the interpreter lock"))
    assert locks.duration_ps.tolist() == waits_ps[waits_ps > 4_000_000_000].tolist() != []
    assert (locks.start_ps[1:] >= (locks.start_ps + locks.duration_ps)[:-1]).all()


def test_sampling_leaves_nothing_behind(tmp_path):
    before = sys.getswitchinterval(), list(gc.callbacks), threading.active_count()
    with stack_profile.capture(tmp_path / "out") as captured:
        time.sleep(0.05)
        assert len(gc.callbacks) > len(before[1])
    path = captured.wait()
    assert (sys.getswitchinterval(), list(gc.callbacks), threading.active_count()) == before
    (stacks,) = load_trace(path).host_stacks
    # Threads of this package from earlier tests, such as a listener's, may still run.
    assert all(thread.name != "capture-stacks" for thread in stacks.threads), "the sampler does not sample itself"


def test_a_capture_without_samples_has_no_file_of_them(tmp_path):
    with stack_profile.capture(tmp_path, stacks_hz=0.0) as captured:
        pass
    assert not list(captured.wait().parent.glob("*.stacks*"))
    assert load_trace(tmp_path).host_stacks == (None,)


def test_a_damaged_file_of_samples_is_named(tmp_path):
    with stack_profile.capture(tmp_path) as captured:
        pass
    (file,) = captured.wait().parent.glob("*.stacks.json.gz")
    file.write_bytes(file.read_bytes()[:-9])
    trace = load_trace(tmp_path)
    assert trace.host_stacks == (None,) and any(file.name in problem for problem in trace.problems)


@pytest.mark.parametrize("hz", [-1.0, 1001.0, float("nan")])
def test_a_rate_that_cannot_be_is_rejected(tmp_path, hz):
    with pytest.raises(stack_profile.CaptureError, match=r"stacks_hz is .*: give a rate up to 1000, or 0"):
        stack_profile.capture(tmp_path, stacks_hz=hz)
