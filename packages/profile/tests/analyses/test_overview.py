"""Steps are timed from start to start; what the host did while the device was idle is told."""

import pytest

from stack_profile.analyses.overview import overview
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


def timeline(build, *, busy, wait, inside, waiting="load batch"):
    """Four steps; after the work of each the host is `wait` outside and `inside` JAX."""
    plane = build.plane("/host:CPU")
    work, host = [], []
    period = busy + wait + inside
    for run in range(4):
        at = run * period
        work.append(plane.event("dot.1", at, busy, hlo_op="dot.1", hlo_module="jit_f", program_id=1, run_id=run))
        host += [plane.event(waiting, at + busy, wait), plane.event("PjitFunction(f)", at + busy + wait, inside)]
    plane.line("tf_XLAExecute/1", *work)
    plane.line("python", *host)
    return trace_of([read_space(build.space(plane))])


@pytest.mark.parametrize(
    ("times", "bound"),
    [
        ({"busy": 95, "wait": 3, "inside": 2}, "device"),
        ({"busy": 50, "wait": 40, "inside": 10}, "host outside JAX"),
        ({"busy": 50, "wait": 10, "inside": 40}, "host inside JAX"),
    ],
)
def test_what_bounds_a_step_comes_with_its_evidence(build, times, bound):
    answer = overview(timeline(build, **times))
    facts = answer.facts
    assert (facts["steps"], facts["bound_by"]) == (4, bound)
    assert facts["median_step_s"] == pytest.approx(100e-6)
    idle_us = 3 * (times["wait"] + times["inside"])
    assert facts["idle_s"] == pytest.approx(idle_us * 1e-6)
    assert facts["idle_steps_share"] == pytest.approx(idle_us / (300 + times["busy"]))
    assert f"load batch {3 * times['wait']} us" in " ".join(answer.notes)
    assert [row.step_s for row in answer.rows] == pytest.approx([100e-6] * 3 + [times["busy"] * 1e-6])


def test_without_events_of_the_host_what_it_did_is_not_known(build):
    plane = build.plane("/device:GPU:0")
    events = (plane.event("dot.1", 100 * run, 20, hlo_op="dot.1", hlo_module="jit_f", program_id=1) for run in range(4))
    plane.line("Stream #1", *events)
    answer = overview(trace_of([read_space(build.space(plane))]))
    assert answer.facts["idle_steps_share"] > 0.5
    assert answer.facts["bound_by"] is None and "has no events of the host" in " ".join(answer.notes)


@pytest.mark.parametrize(("wait", "inside", "bound"), [(30, 20, "input"), (20, 30, "host inside JAX")])
def test_a_program_that_says_where_it_gets_its_input_is_bound_by_it_or_not(build, wait, inside, bound):
    answer = overview(timeline(build, busy=50, wait=wait, inside=inside, waiting="next_batch"))
    assert answer.facts["bound_by"] == bound
    assert any(note.startswith(f"{3 * wait} us idle while the program waited for input") for note in answer.notes)


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_have_the_numbers_of_the_program_whether_or_not_the_host_is_a_step_ahead(build, ahead):
    """Four steps of 100 us; the host annotates step n while it dispatches it, at most a step before it runs."""
    plane = build.plane("/host:CPU")
    runs = enumerate(range(30, 34))
    work = [plane.event("dot.1", 100 * run, 99, hlo_op="dot.1", hlo_module="f", run_id=n) for run, n in runs]
    marks = [(n, 100 * (n - 30 - ahead) - 5 + 10 * ahead) for n in range(30 + ahead, 34 + ahead)]
    plane.line("tf_XLAExecute/1", *work)
    plane.line("python", *(plane.event("train", at, 90, step_num=n) for n, at in marks), timestamp_ns=2_000)
    rows = overview(trace_of([read_space(build.space(plane))])).rows
    assert [row.step_number for row in rows] == [30, 31, 32, 33]


def test_a_real_capture_is_bound_by_something(trace):
    answer = overview(trace)
    assert answer.facts["steps"] == len(answer.rows) == 4
    assert answer.facts["deviation_s"] is not None
    assert sum(row.busy_s + row.idle_s for row in answer.rows) == pytest.approx(answer.facts["all_steps_s"])


def test_runs_that_the_capture_cut_off_are_no_steps(build):
    plane = build.plane("/host:CPU")
    both = {"hlo_module": "jit_f", "program_id": 1}
    names = [f"dot.{index}" for index in range(10)]
    work = [plane.event(name, 5 * index, 5, hlo_op=name, run_id=0, **both) for index, name in enumerate(names[7:])]
    for run in (1, 2):
        work += [
            plane.event(name, 50 * run + 5 * index, 5, hlo_op=name, run_id=run, **both)
            for index, name in enumerate(names)
        ]
    plane.line("tf_XLAExecute/1", *work)
    facts = overview(trace_of([read_space(build.space(plane))])).facts
    assert (facts["steps"], facts["median_step_s"]) == (2, pytest.approx(50e-6))


def test_where_runs_cannot_be_told_apart_steps_are_not_known(build):
    plane = build.plane("/device:GPU:0")
    plane.line("Stream #1", plane.event("kernel of no program", 0, 5))
    answer = overview(trace_of([read_space(build.space(plane))]))
    assert answer.facts["steps"] is None and answer.facts["median_step_s"] is None and answer.facts["bound_by"] is None
    assert "Steps are unknown" in answer.notes[0]


def test_steps_of_a_gpu_count_kernels_copies_to_the_host_and_gaps(h100_train, h100_decode):
    rows = overview(h100_train).rows
    assert [(row.kernels, row.host_copies) for row in rows] == [(2920, 6), (2920, 6)]
    assert all(0 < row.gaps < row.kernels for row in rows)
    # Two tokens with 50 copies each, for the conditions of loops over pages and of branches.
    assert h100_decode["overview"] == [[1684, 101]]
