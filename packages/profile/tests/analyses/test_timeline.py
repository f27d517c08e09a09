"""A step in the order of time: nothing of it is left out, and nothing is there twice."""

import dataclasses
import statistics

import numpy as np
import pytest

from stack_profile.analyses.timeline import timeline
from stack_profile.errors import ProfileError
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import MISSING, read_space

LAYERS = 10  # trips of the loop in the trace


@pytest.mark.parametrize("spans", [1, 7, 60])
def test_the_spans_of_a_step_are_all_of_it(trace, spans):
    answer = timeline(trace, step=2, spans=spans)
    facts, rows = answer.facts, answer.rows
    step_s = trace.steps["CPU:0"][1].duration_ps * 1e-12
    assert facts["window_s"] == pytest.approx(step_s)
    assert len(rows) <= spans
    assert sum(row.self_s for row in rows) == pytest.approx(facts["busy_s"])
    assert sum(row.self_s + row.idle_s for row in rows) == pytest.approx(step_s)
    assert sum(row.self_window_share for row in rows) == pytest.approx(facts["busy_s"] / step_s)
    ends = [row.start_s + row.duration_s for row in rows]
    assert rows[0].start_s == 0 and ends == pytest.approx([*(row.start_s for row in rows[1:]), step_s])
    passes = sum(facts[f"{name}_s"] for name in ("forward", "backward", "recomputed", "unattributed"))
    assert passes == pytest.approx(facts["busy_s"]) and facts["unattributed_s"] == pytest.approx(0)


def test_a_step_goes_forward_through_its_layers_and_back(trace):
    rows = [row for row in timeline(trace, spans=60).rows if row.name.startswith("mlp") and row.trips]
    forward, backward = ([row for row in rows if row.direction == way] for way in ("forward", "backward"))
    assert statistics.median(row.start_s for row in forward) < statistics.median(row.start_s for row in backward)
    for way in (forward, backward):
        starts = {trip: [] for trip in range(1, LAYERS + 1)}
        for row in way:
            first, _, last = row.trips.partition("-")
            for trip in range(int(first), int(last or first) + 1):
                starts[trip].append(row.start_s)
        assert statistics.mean(starts[1]) < statistics.mean(starts[LAYERS])
    assert sum(row.operations for row in timeline(trace, spans=60).rows) > 100


def test_the_step_is_one_of_median_duration_where_none_is_named(trace):
    durations = sorted(step.duration_ps for step in trace.steps["CPU:0"])
    assert timeline(trace).facts["window_s"] == pytest.approx(durations[1] * 1e-12)


@pytest.fixture
def waiting(build):
    """Two steps of 60 us; between them the host loads a batch for 38 us."""
    plane = build.plane("/host:CPU")
    both = {"hlo_module": "jit_f", "program_id": 1}
    work = [plane.event("dot.1", at, 60, hlo_op="dot.1", run_id=run, **both) for run, at in enumerate((0, 100))]
    plane.line("tf_XLAExecute/1", *work)
    plane.line("python", plane.event("train", 0, 160), plane.event("load batch", 61, 38))
    return trace_of([read_space(build.space(plane))])


def test_idle_time_is_a_row_that_says_what_the_host_did(waiting):
    work, idle = timeline(waiting, step=1).rows
    assert (work.name, work.operations, work.direction) == ("jit_f", 1, None)
    assert (idle.name, idle.heaviest, idle.operations, idle.self_s) == ("idle", "load batch", 0, 0)
    assert idle.idle_s == idle.duration_s == pytest.approx(40e-6)


def test_a_window_may_begin_and_end_anywhere(waiting):
    answer = timeline(waiting, since_s=30e-6, until_s=110e-6)
    assert [row.self_s for row in answer.rows] == pytest.approx([30e-6, 0, 10e-6])
    assert answer.facts["step"] is None and any("not a step" in note for note in answer.notes)
    assert timeline(waiting, since_s=0.0).facts["window_s"] == pytest.approx(160e-6)


def test_mistakes_are_named(waiting):
    for arguments, message in (
        ({"step": 3}, "no step 3"),
        ({"step": 0}, "no step 0"),
        ({"spans": 0}, "at least one"),
        ({"step": 1, "since_s": 0.0}, "of a step or of a window"),
        ({"since_s": 1.0}, "is empty"),
    ):
        with pytest.raises(ProfileError, match=message):
            timeline(waiting, **arguments)


def test_without_steps_the_window_is_all_and_without_operations_there_is_no_data(build, waiting):
    (ops,) = waiting.devices
    devices = (dataclasses.replace(ops, run=np.full(len(ops), MISSING)),)
    facts = timeline(dataclasses.replace(waiting, devices=devices)).facts
    assert (facts["step"], facts["steps"]) == (None, 0)
    assert facts["window_s"] == pytest.approx(160e-6)
    empty = timeline(trace_of([read_space(build.space(build.plane("/host:CPU")))]))
    assert empty.rows == () and "No data" in empty.notes[0]


def test_a_span_of_many_short_trips_is_not_named_after_the_gaps_between_them(h100_train):
    idle = [row for row in timeline(h100_train).rows if row.name == "idle"]
    assert all(row.idle_s > row.self_s for row in idle)
