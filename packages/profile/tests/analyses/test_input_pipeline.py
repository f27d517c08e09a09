"""Waiting for input is told from other waiting, and from input that is made while the devices work."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_profile.analyses.input_pipeline import input_pipeline
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space


def looped(build, *, busy, wait, beside=(), steps=4, **stage):
    """Steps of a device, after the work of each of which the program is `wait` in its input."""
    plane = build.plane("/host:CPU")
    work, host = [], []
    for run in range(steps):
        at = run * (busy + wait)
        work.append(plane.event("dot.1", at, busy, hlo_op="dot.1", hlo_module="jit_f", program_id=1, run_id=run))
        host += [plane.event("PjitFunction(f)", at, 1)]
        host += [plane.event("PrefetchDatasetIterator.__next__", at + busy, wait, **stage)]
    plane.line("tf_XLAExecute/1", *work)
    plane.line("python", *host)
    plane.line("python", *(plane.event("Prefetch._getitem", at, duration, **kinds) for at, duration, kinds in beside))
    return trace_of([read_space(build.space(plane))])


PREFETCH = {"_ipl_stage_name": "PrefetchDatasetIterator(threads=1)", "_ipl_stage_cat": "prefetch"}
MAP = {
    **PREFETCH,
    "_ipl_dataset_name": "MapMapDataset(transform=tokenize @ data.py:7)",
    "_ipl_stage_cat": "preprocessing",
}


@pytest.mark.parametrize(("busy", "wait", "bound"), [(60, 40, True), (98, 2, False)])
def test_a_program_is_bound_by_its_input_where_devices_wait_for_it(build, busy, wait, bound):
    answer = input_pipeline(looped(build, busy=busy, wait=wait, **PREFETCH))
    facts, (row,) = answer.facts, answer.rows
    window_us = 3 * 100 + busy
    assert (row.stage, row.kind, row.detail, row.calls) == ("Prefetch", "prefetch", "threads=1", 3)
    assert facts["input_bound"] is bound and answer.notes[0].startswith("input" if bound else "Not input")
    assert facts["all_steps_s"] == pytest.approx(window_us * 1e-6)
    assert facts["input_waited_s"] == facts["input_idle_s"] == facts["idle_s"] == pytest.approx(3 * wait * 1e-6)
    assert row.waited_steps_share == row.idle_steps_share == pytest.approx(3 * wait / window_us)


def test_waiting_while_the_device_works_costs_nothing(build):
    plane = build.plane("/host:CPU")
    plane.line(
        "tf_XLAExecute/1",
        *(
            plane.event("dot.1", 100 * run, 100, hlo_op="dot.1", hlo_module="f", program_id=1, run_id=run)
            for run in (0, 1)
        ),
    )
    plane.line("python", plane.event("PjitFunction(f)", 0, 1), plane.event("next_batch", 50, 80))
    trace = trace_of([read_space(build.space(plane))])
    facts = input_pipeline(trace).facts
    assert facts["input_waited_s"] == pytest.approx(80e-6)
    assert facts["input_idle_s"] == 0.0 and facts["input_bound"] is False


def test_other_idle_time_is_not_the_inputs(build):
    trace = looped(build, busy=60, wait=40)  # of which nothing says that it is input
    answer = input_pipeline(trace)
    assert answer.facts["input_bound"] is None and answer.facts["input_waited_s"] is None
    assert answer.facts["idle_s"] == pytest.approx(120e-6)
    assert "No data" in answer.notes[0] and "TraceAnnotation" in answer.notes[0]


def test_the_stages_before_a_prefetch_run_beside_the_program(build):
    answer = input_pipeline(looped(build, busy=60, wait=40, beside=[(at, 90, MAP) for at in (0, 100, 200)], **PREFETCH))
    _, stage = answer.rows
    assert (stage.stage, stage.detail, stage.threads) == ("Map", "transform=tokenize @ data.py:7", 1)
    assert (stage.self_s, stage.waited_s, stage.idle_s) == (pytest.approx(270e-6), 0.0, 0.0)
    assert stage.call_self_s == pytest.approx(90e-6)
    assert answer.facts["beside_s"] == pytest.approx(270e-6)
    assert any("parallel to the program is Map: 90 us a call" in note for note in answer.notes)


def test_the_time_of_a_stage_is_its_own_without_those_that_it_calls(build):
    plane = build.plane("/host:CPU")
    work = [plane.event("dot.1", at, 50, hlo_op="dot.1", hlo_module="f", program_id=1, run_id=at) for at in (0, 100)]
    plane.line("tf_XLAExecute/1", *work)
    read = {"_ipl_stage_name": "SourceMapDataset(source=Files)", "_ipl_stage_cat": "read"}
    batch = {"_ipl_stage_name": "BatchDatasetIterator(batch_size=4)", "_ipl_stage_cat": "preprocessing"}
    plane.line(
        "python",
        plane.event("PjitFunction(f)", 0, 1),
        plane.event("next_batch", 50, 40),
        plane.event("_BatchDatasetIterator.__next__", 52, 30, **batch),
        plane.event("SourceMapDataset.__getitem__", 60, 20, **read),
        plane.event("DevicePutWithSharding", 92, 6),
    )
    answer = input_pipeline(trace_of([read_space(build.space(plane))]))
    waited = {(row.stage, row.kind): row.waited_s for row in answer.rows}
    assert waited == pytest.approx({
        ("Source", "read"): 20e-6,
        ("Batch", "preprocessing"): 10e-6,
        ("next_batch", "annotation"): 10e-6,
        ("DevicePutWithSharding", "transfer"): 6e-6,
    })  # fmt: skip
    assert answer.facts["input_waited_s"] == pytest.approx(46e-6)


def test_without_steps_there_is_no_data(build):
    answer = input_pipeline(trace_of([read_space(build.space(build.plane("/host:CPU")))]))
    assert answer.rows == () and "No data" in answer.notes[0]
    assert answer.facts["all_steps_s"] is None and answer.facts["input_bound"] is None


def test_a_pipeline_of_grain_shows_its_stages_by_itself(tmp_path):
    data = grain.MapDataset.source(np.ones((64, 8), np.float32)).map(lambda row: row + 1)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    batches = iter(data.to_iter_dataset(options).batch(4))
    step = jax.jit(lambda x: jnp.tanh(x @ x.T))
    step(next(batches)).block_until_ready()
    with stack_profile.capture(tmp_path) as captured:
        for _ in range(4):
            step(jax.device_put(next(batches))).block_until_ready()
    answer = input_pipeline(load_trace(captured.wait()))
    kinds = {row.stage: row.kind for row in answer.rows}
    assert kinds["Source"] == "read" and kinds["Map"] == kinds["Batch"] == "preprocessing"
    assert kinds["Prefetch"] == "prefetch" and "transfer" in kinds.values()
    assert 0 < answer.facts["input_idle_s"] <= answer.facts["input_waited_s"] < answer.facts["all_steps_s"]
    assert sum(row.waited_s for row in answer.rows) == pytest.approx(answer.facts["input_waited_s"])
