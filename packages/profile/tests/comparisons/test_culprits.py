"""A line that makes the steps slower is named first, whatever it does."""

import importlib.util
from pathlib import Path

import pytest

from stack_profile.comparisons.gate import GateSide, gate


def _slow_lines():
    spec = importlib.util.spec_from_file_location("slow_lines", Path(__file__).with_name("slow_lines.py"))
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


LINES = _slow_lines()
COVERING = ("sort", "recompilation", "another program")
TRIES = 3  # a machine that does something else meanwhile may hide what a line takes


@pytest.mark.parametrize(
    "slow", [pytest.param(each, marks=() if each in COVERING else pytest.mark.slow) for each in LINES.SLOW]
)
def test_a_slow_line_is_named_first(tmp_path, slow):
    for attempt in range(TRIES):
        before, after, line = LINES.sides(tmp_path / str(attempt), slow)
        (row,) = gate(*map(GateSide.of_traces, (before, after)), metrics=["step_time"]).rows
        if row.verdict == "regressed":
            break
    assert row.change_base_share > 0.1
    assert LINES.NAMED.get(slow, line) in row.at_fault[0]


def test_twenty_kinds_of_lines_are_slow():
    assert len(LINES.SLOW) == 20 and set(COVERING) <= LINES.SLOW.keys()
