"""The page holds every analysis, fails in parts only, refers to nothing outside, and takes no name for markup."""

import dataclasses
import html
import html.parser
import re
from dataclasses import dataclass

import pytest

from stack_core.abi.errors import UnknownName
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.report.fields import title
from stack_core.report.plots import Bars, Chart, Lanes, Series, Span
from stack_profile.answer import Answer
from stack_profile.report.page import page, sections
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

HOSTILE = "<script>alert('1')</script>\"&\x00\ud800"


@dataclass(frozen=True)
class Row:
    name: str
    self_s: float | None
    busy_share: float


class Reader(html.parser.HTMLParser):
    """Elements as they nest; texts by the id of their section."""

    VOID = ("meta", "wbr")

    def __init__(self, document):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows, self.texts, self.section = [], [], [], {}, {}, ""
        self.feed(document)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("section", "aside"):
            self.section = dict(attrs).get("id", tag)
        if tag == "tr" and "tbody" in self.open:
            self.rows[self.section] = self.rows.get(self.section, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("section", "aside"):
            self.section = ""

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts[self.section] = self.texts.get(self.section, "") + f" {data}"


@pytest.fixture
def analyses(monkeypatch):
    """Makes these functions the registered analyses."""

    def registered(**functions):
        entries = {name: Entry(name, function, "acme", {"help": f"{name}!"}) for name, function in functions.items()}
        monkeypatch.setattr(registries, "analyses", Registry("analyses", lambda: (entries, {})), raising=False)

    return registered


def rendered(trace, **options):
    return page(trace, list(sections(trace)), **options)


def test_every_analysis_has_its_section_with_all_rows_facts_and_notes(trace):
    found = list(sections(trace))
    reader = Reader(page(trace, found, limit=0))
    assert {section.name for section in found} == set(registries.analyses)
    assert [section.failure for section in found if section.failure] == []
    for section in found:
        text = reader.texts[section.name]
        assert reader.rows.get(section.name, 0) == len(section.answer.rows)
        assert all(title(name) in text for name in section.answer.facts)
        assert all(note in text for note in section.answer.notes)
        assert all(plot.title in text for plot in section.answer.plots)
        assert ("a", "href", f"#{section.name}") in reader.attributes
        assert ("section", "id", section.name) in reader.attributes


def test_the_page_is_the_same_every_time_and_refers_to_nothing(trace):
    document = rendered(trace)
    assert document == rendered(trace)
    reader = Reader(document)
    assert {value[:1] for _, name, value in reader.attributes if name in ("href", "src", "action", "data")} == {"#"}
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert "@import" not in document and "url(" not in document
    assert "default-src 'none'" in html.unescape(document)


def test_no_name_becomes_markup(trace, analyses):
    def hostile(trace):
        spans = [Span(HOSTILE, 0.0, 1.0, HOSTILE, HOSTILE), Span("b", 0.0, 1.0, "b", "b")]
        drawn = (
            Bars(HOSTILE, [HOSTILE], {HOSTILE: [1.0]}),
            Chart(HOSTILE, HOSTILE, HOSTILE, [Series(HOSTILE, "dots", [(1.0, 2.0)], [HOSTILE])]),
            Lanes(HOSTILE, spans),
        )
        return Answer(HOSTILE, {HOSTILE: HOSTILE}, Row, (Row(HOSTILE, 1.0, 1.0),), (HOSTILE,), drawn)

    def failing(trace):
        raise RuntimeError(HOSTILE)

    analyses(hostile=hostile, failing=failing)
    about = {"command": [HOSTILE], "jax": HOSTILE}
    document = rendered(dataclasses.replace(trace, source=HOSTILE, about=about, problems=(HOSTILE,)))
    reader = Reader(document)
    assert reader.tags.count("script") == 2
    assert not any(name.startswith("on") for _, name, _ in reader.attributes)
    assert document.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;\ufffd\ufffd") >= 12
    document.encode()


def test_no_name_of_a_trace_becomes_markup(build):
    plane = build.plane(f"/device:GPU:0 {HOSTILE[:-1]}")
    name = HOSTILE[:-1]
    events = (plane.event(name, 100 * run, 20, hlo_op=name, hlo_module=name, program_id=1) for run in range(4))
    plane.line("Stream #1", *events)
    host = build.plane("/host:CPU")
    host.line("python", host.event(f"PjitFunction({name})", 0, 50), host.event(name, 20, 70))
    reader = Reader(rendered(trace_of([read_space(build.space(plane, host, host=name))])))
    assert reader.tags.count("script") == 2 and reader.rows["ops"] == 1
    assert "<script>" in reader.texts["ops"] and "<script>" in reader.texts["overview"]


def test_a_failure_costs_its_own_section_alone(trace, analyses):
    def wrong(trace):
        raise UnknownName("no such device; there is CPU:0")

    def fine(trace):
        return Answer("fine", {"busy_s": 1.0}, Row, (Row("a", 0.25, 0.25),))

    analyses(broken=lambda trace: 1 / 0, fine=fine, wrong=wrong)
    reader = Reader(rendered(trace))
    assert "failed. ZeroDivisionError" in reader.texts["broken"]
    assert "failed. no such device; there is CPU:0" in reader.texts["wrong"]
    assert reader.rows == {"fine": 1} and "25.0%" in reader.texts["fine"] and "% of busy" in reader.texts["fine"]
    assert [value for _, name, value in reader.attributes if name == "class" and value == "failed"] == ["failed"] * 2


def test_a_timeline_that_fails_costs_no_section(trace, analyses, monkeypatch):
    def broken(*_, **options):
        raise IndexError("no lane 7")

    monkeypatch.setattr("stack_profile.report.page.recorded_events", broken)
    analyses(fine=lambda trace: Answer("fine", {}, Row, (Row("a", 0.25, 0.25),)))
    reader = Reader(rendered(trace))
    assert "The timeline failed. IndexError: no lane 7" in reader.texts[""] and reader.rows == {"fine": 1}


def test_a_partial_trace_says_so_before_all_else(trace):
    whole, partial = (rendered(dataclasses.replace(trace, problems=problems)) for problems in ((), ("cut off at 7",)))
    assert "aside" not in Reader(whole).tags
    assert "partial" in Reader(partial).texts["aside"] and "cut off at 7" in Reader(partial).texts["aside"]
    assert partial.index("<aside") < partial.index("<section")


def test_rows_and_texts_are_bounded_and_the_total_is_said(trace, analyses):
    rows = tuple(Row(f"{'long' * 1000} {place}", 1.0, 0.0) for place in range(1000))
    points = [(float(place), float(place)) for place in range(20_000)]
    spans = [Span("lane", float(place), place + 0.5, "op", "kind") for place in range(5_000)]
    drawn = (Chart("chart", "x", "y", [Series("area", "area", points)]), Lanes("lanes", spans))
    analyses(large=lambda trace: Answer("large", {}, Row, rows, (), drawn))
    document = rendered(trace)
    reader = Reader(document)
    assert reader.rows["large"] == 200 and "200 of 1,000 rows" in reader.texts["large"]
    assert "the longest 1,500 of 5,000, on the busiest 1 of 1 lanes" in reader.texts["large"]
    assert len(document) < 500_000
    assert Reader(rendered(trace, limit=0)).rows["large"] == 1000


def test_what_is_not_known_is_a_dash_and_zero_is_zero(trace, analyses):
    rows = (Row("a", None, 0.0), Row("b", 0.0, 0.5))
    analyses(some=lambda trace: Answer("some", {"idle_s": None, "busy_s": 0.0}, Row, rows))
    document = rendered(trace)
    cells = re.findall(r'<td class="number"([^>]*)>([^<]*)</td>', document)
    assert cells == [
        ("", "-"),
        (' data-value="0.0"', "0.0%"),
        (' data-value="0.0"', "0"),
        (' data-value="0.5"', "50.0%"),
    ]
    assert "<dt>idle</dt><dd>-</dd>" in document and "<dt>busy</dt><dd>0</dd>" in document
