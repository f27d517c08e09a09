"""A loop is watched: the trace of a slow step is kept, whole, and nothing is left of the others."""

import time

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile import AnomalyConfig, CaptureWarning, Watch, load_trace
from stack_profile.captures.recording import record

SETTINGS = AnomalyConfig(warmup_steps=0, ratio=5.0)
MANY = AnomalyConfig(warmup_steps=0, ratio=5.0, captures=9, cooldown_steps=0)


@jax.jit
def step(x):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ x)


@pytest.fixture(scope="module")
def x():
    return step(jnp.ones((64, 64))).block_until_ready()


def run(watch, x, durations_s):
    """Steps that take no time and say that they took some, so that no test depends on a quiet machine."""
    for number, duration_s in enumerate(durations_s, 1):
        with jax.profiler.TraceAnnotation(f"step {number}"):
            step(x).block_until_ready()
        watch.finished(number, duration_s)


def annotations(trace):
    return {name for name in trace.host_events.names if name.startswith("step ")}


def test_the_trace_of_a_slow_step_is_kept_whole(tmp_path, x):
    with Watch(tmp_path, SETTINGS) as watch:
        run(watch, x, [0.05] * 42 + [0.3] + [0.05] * 5)
    (captured,) = watch.captures
    trace = load_trace(captured.path)
    assert captured.path.parent.name == "slow_step_43"
    assert {"step 43", "step 44", "step 45"} <= annotations(trace) <= {f"step {number}" for number in range(34, 49)}
    assert trace.about["slow_step"] == {"step": 43, "duration_s": 0.3, "threshold_s": 0.25}
    assert not trace.problems and "partial" not in trace.about


def test_its_operations_have_lines_though_no_program_was_recorded(tmp_path, x):
    with Watch(tmp_path, SETTINGS) as watch:
        run(watch, x, [0.05] * 40 + [0.3])
    (ops,) = load_trace(tmp_path).devices
    mine = [operation for operation in ops.operations if operation.module == "jit_step"]
    assert mine and all(operation.instruction is not None for operation in mine)
    assert "mlp" in {operation.instruction.layer for operation in mine}


def test_a_loop_of_even_steps_keeps_nothing_and_leaves_the_profiler_free(tmp_path, x):
    with Watch(tmp_path, SETTINGS) as watch:
        run(watch, x, [0.05] * 60)
    assert watch.captures == [] and list(tmp_path.iterdir()) == []
    record(host_tracer_level=2).discard()


def test_steps_time_themselves(tmp_path, x):
    with Watch(tmp_path, AnomalyConfig(warmup_steps=0, ratio=20.0, deviations=20.0)) as watch:
        for number in range(60):
            with watch.step():
                step(x).block_until_ready()
                time.sleep(0.5 if number == 50 else 0.002)
    assert "slow_step_51" in {captured.path.parent.name for captured in watch.captures}


def test_a_step_that_compiles_is_not_slow(tmp_path, x):
    with Watch(tmp_path, MANY) as watch:
        run(watch, x, [0.05] * 40)
        jax.jit(lambda x: x * 3)(x)
        watch.finished(41, 0.3)
        watch.finished(42, 0.3)
    assert [captured.path.parent.name for captured in watch.captures] == ["slow_step_42"]


def test_a_capture_that_is_asked_for_goes_before(tmp_path, x):
    with Watch(tmp_path / "slow", MANY) as watch:
        run(watch, x, [0.05] * 40)
        with stack_profile.capture(tmp_path / "asked") as captured:
            run(watch, x, [0.05, 0.3])
        assert load_trace(captured.wait()).devices and not watch.captures
        run(watch, x, [0.05, 0.3])
    assert len(watch.captures) == 1


def test_of_a_loop_that_runs_ahead_the_missing_start_is_named(tmp_path, x):
    with Watch(tmp_path, MANY, runs_ahead=True) as watch:
        run(watch, x, [0.05] * 40)
        first = watch._first_step
        for number in range(41, first):
            watch.finished(number, 0.05)
        watch.finished(first, 0.3)
        for number in range(first + 1, first + 3):
            watch.finished(number, 0.05)
        watch.captures[0].wait()
        number = first + 3
        while watch._is_lost():  # a pause for what the capture has cost
            watch.finished(number, 0.05)
            number += 1
        watch.finished(number, 0.05)
        watch.finished(number + 1, 0.3)
    partial = [load_trace(captured.wait()).about.get("partial") for captured in watch.captures]
    assert f" ms of step {first} are missing" in partial[0] and partial[1] is None


def test_what_cannot_be_written_is_told_and_the_loop_goes_on(tmp_path, x):
    (tmp_path / "file").touch()
    with Watch(tmp_path / "file", SETTINGS) as watch, pytest.warns(CaptureWarning, match="slow step 41 is lost"):
        run(watch, x, [0.05] * 40 + [0.3, 0.05, 0.05])
    assert watch.captures == []


def test_watching_that_costs_too_much_pauses_and_warns(tmp_path, x):
    with Watch(tmp_path, SETTINGS) as watch:
        run(watch, x, [0.05] * 20)
        watch._share = 3e-5  # as if steps had hundreds of times as many events
        with pytest.warns(CaptureWarning, match=r"only found in \d+% of the time"):
            run(watch, x, [0.05] * 4000)
    assert watch.captures == [] and watch.recorded_s < 0.2 * watch.watched_s
    assert watch.cost_s <= 6e-5 * watch.watched_s
