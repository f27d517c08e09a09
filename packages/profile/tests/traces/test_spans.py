"""Every instant of a window is in one item, at its time; spans join what is alike, and specks what they are in."""

import numpy as np
import pytest

from stack_profile.analyses.timeline import timeline
from stack_profile.traces.spans import IDLE, Items, Key, cut, items_of
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


def items(*parts):
    """Items of (path, direction, trip, size), one after the other."""
    keys = {IDLE: 0}
    rows = [
        keys.setdefault(Key(tuple(path.split("/")), *rest) if path else IDLE, len(keys)) for path, *rest, _ in parts
    ]
    size = np.array([part[-1] for part in parts], float)
    start = np.cumsum(size) - size
    return Items(tuple(keys), np.array(rows), np.arange(len(rows)), start, start + size, start)


def test_loops_have_the_time_in_which_nothing_in_them_runs_where_it_is(build):
    plane = build.plane("/host:CPU")
    both = {"hlo_module": "jit_f", "program_id": 1, "run_id": 0}
    events = (("while.1", 0, 100), ("while.2", 10, 60), ("dot.3", 20, 20), ("dot.4", 80, 20), ("dot.5", 120, 10))
    plane.line("worker", *(plane.event(name, at, us, hlo_op=name, **both) for name, at, us in events))
    (ops,) = trace_of([read_space(build.space(plane))]).devices
    found = items_of(ops, 0, 140_000_000)
    names = [ops.operations[row].name if row >= 0 else "idle" for row in found.operation.tolist()]
    sizes = (found.size_ps / 1e6).tolist()
    assert list(zip(names, sizes, strict=True)) == [
        ("while.1", 20), ("dot.3", 20), ("while.2", 40), ("dot.4", 20), ("idle", 20), ("dot.5", 10), ("idle", 10),
    ]  # fmt: skip
    assert found.size_ps.sum() == 140e6
    assert len(found.executions_ps) == 3


def test_an_instant_belongs_to_the_latest_operation_that_runs(build):
    """No span is busier than it is long, even if a long operation starts just before those of another layer."""
    plane = build.plane("/host:CPU")
    both = {"hlo_module": "jit_f", "program_id": 1, "run_id": 0}
    for number, (name, at, us) in enumerate((("long.1", 0, 24_000), ("short.2", 94, 200), ("next.3", 300, 30_000))):
        plane.line(f"worker/{number}", plane.event(name, at, us, hlo_op=name, **both))
    trace = trace_of([read_space(build.space(plane))])
    found = items_of(trace.devices[0], 0, 30_300_000_000)
    names = [trace.devices[0].operations[row].name for row in found.operation.tolist()]
    sizes = (found.size_ps / 1e6).tolist()
    assert list(zip(names, sizes, strict=True)) == [("long.1", 94), ("short.2", 200), ("long.1", 6), ("next.3", 30_000)]
    assert found.executions_ps.tolist() == [0, 94_000_000, 300_000_000]
    for row in timeline(trace, spans=9).rows:
        assert row.duration_s == pytest.approx(row.self_s + row.idle_s)


def test_neighbours_of_one_key_are_a_span_and_others_are_not():
    parts = [("a", "forward", 0, 5), ("a", "forward", 0, 5), ("a", "backward", 0, 5), ("a", "backward", 1, 5)]
    assert cut(items(*parts), 9) == [0, 2, 3]


def test_a_speck_joins_the_neighbour_that_is_more_like_it():
    parts = [("a/b", "forward", 0, 900), ("c/x", "forward", 0, 1), ("c/d", "forward", 0, 900)]
    assert cut(items(*parts), 9) == [0, 1]
    parts[1] = ("a/x", "forward", 0, 1)
    assert cut(items(*parts), 9) == [0, 2]


def test_too_many_spans_lose_the_inner_ends_of_their_names_before_they_are_mixed():
    parts = [(f"block/{part}", way, 0, 10) for way in ("forward", "backward") for part in ("a", "b", "c")]
    assert len(cut(items(*parts), 6)) == 6
    assert cut(items(*parts), 5) == [0, 3]
    assert cut(items(*parts), 1) == [0]


@pytest.mark.parametrize("most", [1, 2, 7, 50])
def test_there_are_never_more_than_asked_for(most):
    random = np.random.default_rng(0)
    parts = [(random.choice(["a", "a/b", "c", ""]), "forward", 0, int(random.integers(1, 99))) for _ in range(300)]
    firsts = cut(items(*parts), most)
    assert firsts[0] == 0 and len(firsts) <= most and firsts == sorted(set(firsts))
