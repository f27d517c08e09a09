"""Gaps between operations are summed by their cause and the line before them."""

import pytest

from stack_profile.analyses.idle import idle
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


def test_gaps_between_operations_runs_programs_and_copies(build):
    plane = build.plane("/host:CPU")
    events = []
    for run in range(3):
        both = {"program_id": 1, "run_id": run, "hlo_module": "jit_f"}
        at = 100 * run
        events.append(plane.event("dot.1", at, 10, hlo_op="dot.1", **both))
        events.append(plane.event("dot.2", at + 13, 10, hlo_op="dot.2", **both))
        other = {"program_id": 2, "run_id": 10 + run, "hlo_module": "jit_g"}
        if run == 1:
            events.append(plane.event("add.1", at + 50, 5, hlo_op="add.1", **other))
    plane.line("tf_worker", *events)
    plane.line("python", plane.event("sleep", 23, 77))
    answer = idle(trace_of([read_space(build.space(plane))]))
    found = {row.cause: (row.gaps, round(row.idle_s * 1e6), row.before, row.after) for row in answer.rows}
    assert found == {
        "between operations": (3, 9, "dot.1", "dot.2"),
        "between runs": (1, 77, "dot.2", "dot.1"),
        "between programs": (2, 72, "add.1", "dot.1"),
    }
    assert {row.cause: row.host for row in answer.rows}["between runs"] == "sleep"
    assert answer.facts["idle_s"] == pytest.approx(158e-6) and answer.facts["gaps"] == 6


def test_a_device_waits_after_the_host_has_read_a_condition(h100_decode):
    found = {(cause, line): (gaps, idle_s) for cause, line, gaps, idle_s in h100_decode["idle"]}
    gaps, idle_s = found["condition read by the host", "stack_serve/llm/cache.py:150"]
    assert gaps == 96 and idle_s == pytest.approx(5.4e-3, rel=0.01)
    assert idle_s > sum(each for (cause, _), (_, each) in found.items() if cause == "between operations")
