"""Exports hold the whole time, in the form that each tool reads."""

import csv
import io
import json

import pytest

from stack_profile.analyses.graph import graph
from stack_profile.exports import EXPORTS


def exported(trace, name):
    return "".join(EXPORTS[name](trace))


def test_stacks_hold_the_self_time_under_the_lines_that_asked_for_it(trace):
    (ops,) = trace.devices
    lines = exported(trace, "folded").splitlines()
    weights = [int(line.rpartition(" ")[2]) for line in lines]
    assert sum(weights) == pytest.approx(ops.union_ps / 1e3, rel=1e-3)
    heaviest = lines[weights.index(max(weights))]
    assert "conftest.py" in heaviest and "step" in heaviest


def test_speedscope_is_of_its_schema(trace):
    content = json.loads(exported(trace, "speedscope"))
    (profile,) = content["profiles"]
    (ops,) = trace.devices
    assert sum(profile["weights"]) == pytest.approx(profile["endValue"]) == pytest.approx(ops.busy_s)
    assert len(profile["samples"]) == len(profile["weights"])
    assert max(max(sample) for sample in profile["samples"]) == len(content["shared"]["frames"]) - 1


def test_a_spreadsheet_has_a_row_an_operation(trace):
    rows = list(csv.DictReader(io.StringIO(exported(trace, "csv"))))
    assert len(rows) == len(trace.devices[0].operations)
    assert sum(float(row["busy_share"]) for row in rows) == pytest.approx(1)


def test_graphviz_gets_the_most_expensive_operation_and_what_is_around_it(trace):
    text = exported(trace, "dot")
    heaviest = graph(trace).facts["instruction"]
    assert text.startswith("digraph {") and f'"{heaviest}" [label=' in text and " -> " in text
