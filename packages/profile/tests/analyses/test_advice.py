"""Slow programs with a known cause: the advice names the cause first, with its line and its evidence."""

import time

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.analyses.advice import advice
from stack_profile.analyses.overview import overview
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space

STEPS = 5


def captured(folder, run):
    run(0)  # compiles
    with stack_profile.capture(folder) as capture:
        for number in range(1, STEPS + 1):
            run(number)
    capture.wait()
    return load_trace(folder)


def recompiling():
    step = jax.jit(lambda x: jnp.tanh(x @ x.T).sum())
    return lambda number: step(jnp.ones((32 + number, 64))).block_until_ready()


def waiting_for_the_host():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((256, 256))

    def run(number):
        step(x).block_until_ready()
        time.sleep(0.02)

    return run


def waiting_for_input():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((256, 256))

    def run(number):
        with jax.profiler.TraceAnnotation("next_batch"):
            time.sleep(0.02)
        step(x).block_until_ready()

    return run


def casting():
    step = jax.jit(lambda weights: [each.astype(jnp.bfloat16) for each in weights])
    weights = [jnp.ones((2048, 2048)) * number for number in range(4)]
    return lambda number: jax.block_until_ready(step(weights))


def transposing():
    step = jax.jit(lambda arrays: [each.swapaxes(0, 1) for each in arrays])
    arrays = [jnp.ones((2048, 1024)) * number for number in range(4)]
    return lambda number: jax.block_until_ready(step(arrays))


def in_float32():
    def step(x, weight):
        for _ in range(4):
            x = jnp.tanh(x @ weight)
        return x

    step, x = jax.jit(step), jnp.ones((1024, 1024))
    return lambda number: step(x, x).block_until_ready()


CAUSES = {
    "recompilation": recompiling,
    "host-bound steps": waiting_for_the_host,
    "slow input": waiting_for_input,
    "casts": casting,
    "layout copies": transposing,
    "float32 products": in_float32,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_program_gets_its_seeded_cause_first(tmp_path, cause):
    trace = captured(tmp_path, CAUSES[cause]())
    # The peaks of a known chip make the advice independent of the machine of the test.
    answer = advice(trace, chip="h100")
    first = answer.rows[0]
    assert first.cause == cause, [(row.cause, row.gain_s, row.evidence) for row in answer.rows]
    assert first.gain_elapsed_share == pytest.approx(first.gain_s / answer.facts["elapsed_s"])
    assert 0.05 < first.gain_elapsed_share <= 1
    assert first.evidence and first.change and first.event
    if cause in ("casts", "layout copies", "float32 products"):
        assert first.line.rpartition(":")[0] == __file__
    assert [row.gain_s for row in answer.rows] == sorted((row.gain_s for row in answer.rows), reverse=True)


def test_causes_on_the_host_share_the_idle_time(tmp_path):
    trace = captured(tmp_path, waiting_for_input())
    gains = {row.cause: row.gain_s for row in advice(trace, min_share=0.0).rows}
    idle_s = gains["slow input"] + gains["host-bound steps"]
    assert idle_s == pytest.approx(overview(trace).facts["idle_s"], rel=1e-6)


def test_nested_events_of_one_name_count_the_idle_time_once(build):
    plane = build.plane("/host:CPU")
    about = {"hlo_op": "fusion", "hlo_module": "jit_f", "program_id": 1}
    plane.line("worker", *(plane.event("fusion", at, 10, run_id=1 + at, **about) for at in (0, 110)))
    # The union of the calls is 60 us, their sum 120 us; the single event is longer than the union.
    plane.line("python", *(plane.event("recursive", 20, length) for length in (60, 40, 20)))
    plane.line("other", plane.event("waiting", 25, 80))
    (row,) = advice(trace_of([read_space(build.space(plane))])).rows
    assert row.cause == "host-bound steps"
    assert row.event == "waiting" and row.evidence.endswith("the longest event meanwhile is waiting, 80 us")


def test_exposed_collectives_have_their_time_and_line(tpu_trace):
    (row,) = (row for row in advice(tpu_trace).rows if row.cause == "exposed collectives")
    assert row.gain_s == pytest.approx((2 * 40 + 2 * 35) * 1e-6 / 2)
    assert "all-gather" in row.evidence and "all-reduce" in row.evidence


def test_small_gains_are_left_out_and_nothing_is_no_data(tpu_trace, build):
    assert advice(tpu_trace, min_share=0.99).rows == ()
    assert "No cause takes 99%" in advice(tpu_trace, min_share=0.99).notes[0]
    empty = trace_of([read_space(build.space(build.plane("/host:CPU")))])
    assert advice(empty).rows == () and "No data" in advice(empty).notes[0]
