"""There is one profiler: recordings take turns, one that yields goes, and what is thrown away leaves nothing behind."""

import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import _profiler

from stack_profile import CaptureError
from stack_profile.captures.recording import Background, record
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


@jax.jit
def work(x):
    return jnp.tanh(x @ x)


X = jnp.ones((8, 8))


@pytest.fixture
def recording():
    recording = record(host_tracer_level=2)
    yield recording
    recording.discard()


def test_what_runs_until_the_end_is_recorded(recording):
    for _ in range(3):
        work(X).block_until_ready()
    recording.end()
    recording.wait_until_off()
    work(X).block_until_ready()
    (ops,) = trace_of([read_space(recording.data())]).devices
    modules = np.array([operation.module for operation in ops.operations])[ops.which]
    assert len(set(ops.run[modules == "jit_work"].tolist())) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs a system whose threads have priorities")
def test_to_encode_has_the_lowest_priority_once_nothing_is_recorded(recording, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "setpriority", lambda *given: calls.append((*given, _profiler.TraceMe.is_enabled())))
    recording.end()
    recording.data()
    assert calls == [(os.PRIO_PROCESS, recording._stopping._thread.native_id, 19, False)]


def test_the_next_recording_waits_for_one_that_ends(recording):
    recording.end()
    second = record(host_tracer_level=2)
    second.discard()
    assert read_space(recording.data()).planes


def test_one_that_yields_waits_for_no_other(recording):
    recording._stopping = object()  # what encodes it, and takes its time
    with pytest.raises(CaptureError, match="Another capture"):
        record(host_tracer_level=2, yields=True)
    recording._stopping = None


def test_work_is_done_where_no_thread_can_be_started(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    background = Background(lambda: done.append(True), "work")
    background.join()
    background.lower_priority()
    assert done == [True] and not background.runs


def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_one_that_runs_is_not_taken(recording):
    with pytest.raises(CaptureError, match="Another capture"):
        record(host_tracer_level=2)


def test_one_that_yields_is_lost_to_another_and_says_so():
    first = record(host_tracer_level=2, yields=True)
    second = record(host_tracer_level=2)
    assert first.lost and not first.end()
    first.discard()
    with pytest.raises(CaptureError, match="Another capture"):
        record(host_tracer_level=2)
    second.discard()
    record(host_tracer_level=2).discard()


def test_a_profiler_that_another_holds_without_a_sign_is_named():
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    other = _profiler.ProfilerSession(options)
    recording = record(host_tracer_level=2)
    recording.end()
    with pytest.raises(CaptureError, match="The capture is empty"):
        recording.data()
    other.stop()
