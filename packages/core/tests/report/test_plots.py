"""Bars of rows: the rest is one of them, and what is not known adds nothing."""

from dataclasses import dataclass

from stack_core.report.plots import bars


@dataclass(frozen=True)
class Row:
    name: str
    a_s: float
    b_s: float | None


def test_what_is_beyond_the_limit_is_summed_up():
    rows = [
        Row("zero", 0.0, None),
        *(Row(f"row {place}", 1.0, float(place)) for place in range(5)),
        Row("x", 2.0, None),
    ]
    found = bars("title", rows, "a_s", "b_s", limit=2)
    assert list(found.labels) == ["row 0", "row 1", "4 others"]
    assert {name: list(values) for name, values in found.parts.items()} == {"a_s": [1, 1, 5], "b_s": [0, 1, 9]}


def test_no_rows_are_no_bars():
    assert (list(bars("title", [], "a_s").labels), dict(bars("title", [], "a_s").parts)) == ([], {})
