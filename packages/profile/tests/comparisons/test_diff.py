"""What changed is named first, what did not is not named, and all rows together are the change of the busy time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_profile.comparisons.diff import diff
from stack_profile.errors import ProfileError
from stack_profile.traces.operations import Operation, Ops
from stack_profile.traces.trace import Trace, trace_of
from stack_profile.traces.xplane import Space, read_space

TYPICAL = {f"fusion.{place}": 0.2e9 * (place + 1) for place in range(12)}  # picoseconds
OPERATIONS = tuple(Operation(name, "jit_step", 7, None, None) for name in TYPICAL)


def capture(rng, *, steps=60, slower=(), factor=1.1, drift=0.1, pace=1.0):
    """A capture as a busy machine makes it: slower in all than the next one, noisy, and now and then stalled."""
    load = np.zeros(steps)
    for step in range(1, steps):
        load[step] = 0.7 * load[step - 1] + 0.02 * rng.normal()
    size = (steps, len(TYPICAL))
    own = 0.003 * rng.normal(size=size[1]) + 0.02 * rng.normal(size=size)
    typical = [time * (factor if name in slower else 1) for name, time in TYPICAL.items()]
    durations = typical * np.exp(drift * rng.normal() + load[:, None] + own)
    durations *= np.broadcast_to(pace, steps)[:, None]
    durations += rng.exponential(5e9, size) * (rng.random(size) < 0.02)
    ends = durations.round().astype(np.int64).cumsum().reshape(size)
    starts = np.append(0, ends.reshape(-1)[:-1])
    which, run = np.tile(np.arange(size[1]), steps), np.repeat(np.arange(steps), size[1])
    ops = Ops("CPU:0", OPERATIONS, which, starts, ends.reshape(-1), durations.reshape(-1), run)
    return Trace("memory", (Space((), ("vm",), ()),), {}, (), (ops,), ())


def changed(answer):
    return [row.name for row in answer.rows if row.verdict in ("slower", "faster")]


def test_of_twenty_identical_pairs_at_most_one_is_flagged():
    rng = np.random.default_rng(0)
    pairs = [diff([capture(rng)], [capture(rng)]) for _ in range(20)]
    assert sum(bool(changed(answer)) for answer in pairs) <= 1
    # Which no test of the steps alone would say: captures differ.
    assert sum(any(row.low_s * row.high_s > 0 for row in answer.rows) for answer in pairs) > 10


def test_of_identical_sides_of_several_captures_at_most_one_is_flagged():
    rng = np.random.default_rng(1)
    sides = [[capture(rng, steps=10) for _ in range(3)] for _ in range(20)]
    assert sum(bool(changed(diff(*pair))) for pair in zip(sides[::2], sides[1::2], strict=True)) <= 1


@pytest.mark.parametrize("captures", [1, 4])
def test_an_operation_that_became_a_tenth_slower_is_named_first(captures):
    rng = np.random.default_rng(2)
    drift = 0.1 if captures == 1 else 0.01  # several captures tell what the machine does, where it does not do much
    answers = []
    for _ in range(5):
        before = [capture(rng, drift=drift) for _ in range(captures)]
        after = [capture(rng, drift=drift, slower=["fusion.5"]) for _ in range(captures)]
        answers.append(diff(before, after))
    assert {answer.rows[0].name for answer in answers} == {"jit_step: fusion.5"}
    verdicts = [(answer.rows[0].verdict, len(changed(answer))) for answer in answers]
    # Where the machine is faster by as much as the operation is slower, it takes as long as before, and is not named.
    assert verdicts.count(("slower", 1)) >= 4 and set(verdicts) <= {("slower", 1), ("not shown", 0)}


def test_what_half_of_the_operations_share_makes_the_others_no_faster():
    rng = np.random.default_rng(3)
    half = list(TYPICAL)[::2]
    answer = diff([capture(rng, drift=0)], [capture(rng, drift=0, slower=half)])
    assert {row.verdict for row in answer.rows if row.name not in half} <= {"not shown", "not known"}


def test_an_operation_is_named_on_a_machine_that_changes_its_pace_during_a_capture():
    rng = np.random.default_rng(6)
    pace = np.where(np.arange(60) < 25, 2.0, 1.0)
    answer = diff([capture(rng, pace=pace)], [capture(rng, pace=pace[::-1], slower=["fusion.5"])])
    assert changed(answer) == ["jit_step: fusion.5"]
    assert answer.rows[0].low_s < 0 < answer.rows[0].high_s  # its seconds alone would not tell


def test_what_all_operations_share_is_a_fact_and_no_operations():
    rng = np.random.default_rng(3)
    everything = capture(rng, drift=0), capture(rng, drift=0, slower=TYPICAL, factor=1.5)
    answer = diff(*([trace] for trace in everything))
    assert changed(answer) == []
    assert answer.facts["median_change_before_share"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("by", ["op", "line", "layer", "category"])
def test_rows_sum_to_the_change_of_the_busy_time(build, by):
    rng = np.random.default_rng(4)
    before = {"dot.1": rng.integers(100, 200, 10), "dot.2": rng.integers(100, 200, 10)}
    after = {"dot.1": rng.integers(200, 300, 10), "copy.1": rng.integers(100, 200, 10)}
    answer = diff(*([trace_of([read_space(build.steps(each))])] for each in (before, after)), by=by)
    expected_s = 1e-6 * (np.mean(sum(after.values())) - np.mean(sum(before.values())))
    facts = answer.facts
    assert facts["busy_change_s"] == pytest.approx(expected_s)
    assert sum(row.change_s for row in answer.rows) == pytest.approx(expected_s)
    assert facts["attributed_change_s"] + facts["unattributed_change_s"] == pytest.approx(expected_s)
    assert facts["matched_change_s"] + facts["appeared_s"] - facts["disappeared_s"] == pytest.approx(expected_s)
    assert facts["step_change_s"] == pytest.approx(facts["busy_change_s"] + facts["idle_change_s"])
    assert facts["appeared_s"] == pytest.approx(1e-6 * np.mean(after["copy.1"]))
    if by == "op":
        assert {row.name: row.matched for row in answer.rows} == {
            "jit_step: dot.1": "alike",
            "jit_step: dot.2": "disappeared",
            "jit_step: copy.1": "appeared",
            "(irregular)": "",
        }


def test_two_programs_without_anything_in_common(build):
    answer = diff(*([trace_of([read_space(build.steps({name: [100] * 5}))])] for name in ("dot", "sort")))
    assert {row.matched for row in answer.rows} == {"appeared", "disappeared", ""}
    named = {row.matched: row.verdict for row in answer.rows}
    assert named == {"appeared": "slower", "disappeared": "faster", "": "not known"}  # which no chance makes
    assert answer.facts["median_change_before_share"] is None


def test_one_step_decides_nothing(build):
    side = [trace_of([read_space(build.steps({"dot.1": [100], "dot.2": [time]}))]) for time in (100, 200)]
    answer = diff(side[:1], side[1:])
    assert answer.rows[0].name == "jit_step: dot.2" and answer.rows[0].verdict == "not known"
    assert answer.rows[0].p is None and answer.rows[0].low_s is None
    assert answer.facts["step_change_low_s"] is None
    assert any("one step" in note for note in answer.notes)


def test_without_operations_there_are_no_steps(build):
    plane = build.plane("/host:CPU")
    plane.line("main", plane.event("PjitFunction(f)", 0, 10))
    trace = trace_of([read_space(build.space(plane))])
    answer = diff([trace], [trace])
    assert answer.rows == () and "Steps are unknown" in answer.notes[0]
    with pytest.raises(ProfileError, match="no captures"):
        diff([], [trace])


def program(build, width, *, sort):
    """A trace of a program of two layers, the second of which is sorted or not."""

    def step(x):
        with jax.named_scope("first"):
            x = jnp.sort(x, axis=0)
        with jax.named_scope("second"):
            return jnp.sort(x, axis=1) if sort else x

    compiled = jax.jit(step).lower(jnp.ones((4, width))).compile()
    proto = build.hlo_proto(compiled)
    sorts = re.findall(r"%(\S+) = [^=]* sort\(", compiled.as_text())
    assert len(sorts) == 1 + sort
    return trace_of([read_space(build.steps({name: [100] * 5 for name in sorts}, proto=proto))])


def test_rows_have_the_places_of_the_program_after_and_definitions_that_differ_are_said(build):
    before, after = program(build, 8, sort=False), program(build, 16, sort=True)
    answer = diff([before], [after], by="layer")
    assert {row.name: row.matched for row in answer.rows if row.name.startswith(("f", "s"))} == {
        "first": "other shapes",
        "second": "appeared",
    }
    assert {row.line.startswith(__file__) for row in answer.rows if row.name in ("first", "second")} == {True}
    assert any("arguments differ: x: f32[4,8], f32[4,16]" in note for note in answer.notes)
    assert answer.facts["unattributed_change_s"] == 0
    same = diff([before], [before])
    assert any("same operations" in note for note in same.notes) and changed(same) == []
    assert not any("differ:" in note for note in same.notes)


def test_machines_and_programs_that_differ_are_said(build):
    def trace(module, about):
        plane = build.plane("/host:CPU")
        stats = {"hlo_op": "dot", "hlo_module": module, "program_id": 7}
        plane.line("worker", *(plane.event("dot", 100 * run, 50, **stats, run_id=run) for run in range(4)))
        return trace_of([read_space(build.space(plane))], about=about)

    before, after = {"device_kind": "TPU v5e", "jax": "0.11.2"}, {"device_kind": "TPU v6e", "cores": 4}
    notes = diff([trace("jit_step", before)], [trace("jit_update", after)]).notes
    assert "The programs whose runs are the steps differ: jit_step before, jit_update after." in notes
    assert "The chips differ: TPU v5e before, TPU v6e after." in notes
    assert sum("differ:" in note for note in notes) == 2  # what one side does not say is not known to differ
