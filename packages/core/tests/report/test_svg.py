"""Plots are drawn to scale, and what cannot be drawn is said."""

import re

import pytest

from stack_core.report.plots import Bars, Chart, Lanes, Series, Span
from stack_core.report.svg import draw


def numbers(drawing, attribute, tag="rect"):
    return [float(value) for value in re.findall(rf'<{tag}[^>]* {attribute}="([\d.]+)%?"', drawing)]


def test_bars_are_parts_of_the_longest_and_follow_each_other():
    drawing = draw(Bars("title", ["a", "b"], {"one_s": [3.0, 1.0], "two_s": [1.0, 0.0]}))
    bars = drawing.partition('class="bars"')[2]
    assert numbers(bars, "width") == [75, 25, 25] and numbers(bars, "x") == [0, 75, 0]
    assert "one: 3 s" in bars and ">4 s<" in bars


def test_a_part_that_is_nowhere_has_no_entry_in_the_legend():
    assert "legend" not in draw(Bars("title", ["a"], {"one_s": [1.0], "two_s": [0.0]}))


@pytest.mark.parametrize(
    "plot",
    [
        Bars("title", [], {}),
        Bars("title", ["a"], {"self_s": [0.0]}),
        Chart("title", "x", "y", [Series("a", "dots", [])]),
        Chart("title", "x", "y", [Series("a", "line", [(float("nan"), 1.0)])]),
        Chart("title", "x", "y", [Series("a", "dots", [(0.0, 1.0)])], log=True),
        Lanes("title", []),
    ],
    ids=str,
)
def test_where_nothing_can_be_drawn_a_sentence_says_so(plot):
    drawing = draw(plot)
    assert "Nothing to draw" in drawing and "<svg" not in drawing


def test_equal_factors_are_equal_distances_on_logarithmic_axes():
    points = [(1.0, 1.0), (10.0, 100.0), (100.0, 10_000.0)]
    drawing = draw(Chart("title", "intensity", "rate_flops_s", [Series("a", "dots", points)], log=True))
    left, middle, right = numbers(drawing, "cx", "circle")
    assert right - middle == pytest.approx(middle - left)
    assert "10 k" in drawing and ">100<" in drawing


@pytest.mark.parametrize(("field", "high", "tick"), [("live_bytes", 5.5 * 2**20, "2 MiB"), ("step_s", 0.031, "10 ms")])
def test_the_marks_of_an_axis_are_round_in_its_unit(field, high, tick):
    drawing = draw(Chart("title", "position", field, [Series("a", "area", [(0.0, 0.0), (9.0, high)])]))
    assert f">{tick}<" in drawing


def test_all_values_alike_are_drawn():
    assert "<circle" in draw(Chart("title", "step", "step_s", [Series("a", "dots", [(1.0, 0.0)])]))


def test_spans_lie_on_their_lanes_as_long_as_they_took():
    spans = [Span("a", 5.0, 6.0, "x", "one"), Span("b", 6.0, 8.0, "y", "two"), Span("a", 8.0, 9.0, "z", "one")]
    drawing = draw(Lanes("title", spans)).partition('class="wide"')[2]
    found = zip(*(numbers(drawing, each) for each in ("x", "y", "width")), strict=True)
    places = dict(zip(re.findall(r"<title>([xyz])\n", drawing), found, strict=True))
    assert places["x"][1] == places["z"][1] < places["y"][1]
    assert places["y"][2] == pytest.approx(2 * places["x"][2], abs=0.02)
    assert places["z"][0] == pytest.approx(places["x"][0] + 3 * places["x"][2], abs=0.05)


def test_lanes_beyond_the_busiest_are_left_out_and_counted():
    spans = [Span(f"lane {place}", 0.0, 1.0 + place, "name", "kind") for place in range(20)]
    drawing = draw(Lanes("title", spans))
    assert "the longest 12 of 20, on the busiest 12 of 20 lanes" in drawing
    assert ">lane 8<" in drawing and ">lane 7<" not in drawing


def test_kinds_are_named_as_they_are():
    spans = [Span("a", 0.0, 1.0, "x", "linear_cross_entropy"), Span("a", 1.0, 2.0, "x", "loss_s")]
    assert ">linear_cross_entropy<" in draw(Lanes("title", spans)) and ">loss_s<" in draw(Lanes("title", spans))


def test_more_kinds_than_colours_share_the_last():
    spans = [Span("a", float(place), place + 1.0, "name", f"kind {place}") for place in range(12)]
    legend = draw(Lanes("title", spans)).partition('class="wide"')[0]
    assert legend.count('class="entry"') == 8 and ">others<" in legend


def test_close_heights_have_as_many_digits_as_tell_them_apart():
    points = [(1.0, 10.02), (2.0, 10.13)]
    drawing = draw(Chart("title", "step", "loss", [Series("a", "line", points)], from_zero=False))
    assert re.findall(r">(10\.\d+)<", drawing) == ["10.02", "10.04", "10.06", "10.08", "10.10", "10.12"]


def test_a_line_of_many_points_keeps_its_lowest_and_its_highest():
    points = [(float(step), {4000: -5.0, 6000: 9.0}.get(step, 1.0)) for step in range(10_000)]
    drawing = draw(Chart("title", "step", "loss", [Series("a", "line", points)], from_zero=False))
    (path,) = re.findall(r'<polyline points="([^"]+)"', drawing)
    heights = [float(place.split(",")[1]) for place in path.split()]
    assert len(heights) <= 1500 and min(heights) == 10 and max(heights) == 208


def test_a_faint_line_lies_behind_the_others_and_a_small_chart_names_no_axes():
    series = [Series("mean", "line", [(1.0, 1.0), (2.0, 2.0)]), Series("", "faint", [(1.0, 2.0), (2.0, 1.0)])]
    drawing = draw(Chart("title", "step", "loss", series, size="small"))
    assert drawing.index('class="faint curve c0"') < drawing.index('class="curve c0"')
    assert 'class="axis"' not in drawing and ">step<" not in drawing
