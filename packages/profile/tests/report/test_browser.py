"""A browser shows the page: nothing is loaded, nothing complains, tables sort, a narrow screen is wide enough."""

from dataclasses import dataclass

import pytest

from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_profile.answer import Answer
from stack_profile.exports import write
from stack_profile.report.page import page, sections


@dataclass(frozen=True)
class Row:
    name: str
    self_s: float | None


ROWS = (Row("b", 0.002), Row("c", None), Row("a", 0.03), Row("d<script>document.title = 'taken'</script>", 0.0))
COLUMN = "[...document.querySelectorAll('#some tbody tr')].map(row => row.cells[0].textContent[0]).join('')"


@pytest.fixture(scope="module")
def report(trace, tmp_path_factory):
    """A page of all analyses and of one whose rows are known."""
    entries = {entry.name: entry for entry in registries.analyses.entries()}
    entries["some"] = Entry("some", lambda trace: Answer("some", {}, Row, ROWS), "acme")
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registries, "analyses", Registry("analyses", lambda: (entries, {})), raising=False)
        write([page(trace, list(sections(trace)))], path)
    return path


def test_nothing_is_loaded_and_nothing_complains(browser, report):
    browser.open(report)
    assert browser.requested == [report.as_uri()]
    assert browser.complaints == []
    assert browser.evaluate("document.title").startswith("Profile of ")
    assert browser.evaluate("document.querySelectorAll('main > section').length") >= 6
    assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 6


def test_headings_sort_their_table_and_what_is_not_known_stays_last(browser, report):
    browser.open(report)
    name, self_time = (f"document.querySelectorAll('#some th button')[{column}].click()" for column in range(2))
    assert browser.evaluate(COLUMN) == "bcad"
    for click, order in ((self_time, "abdc"), (self_time, "dbac"), (name, "abcd"), (name, "dcba")):
        browser.evaluate(click)
        assert browser.evaluate(COLUMN) == order
    assert browser.complaints == []


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_as_wide_as_the_screen(browser, report, width):
    browser.open(report, width=width)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width


def test_the_policy_stops_a_script_that_is_not_the_pages(browser, report):
    document = report.read_text().replace("</body>", "<script>document.title = 'taken'</script></body>")
    report.with_name("taken.html").write_text(document)
    browser.open(report.with_name("taken.html"))
    assert browser.evaluate("document.title") != "taken"
    assert any("Content Security Policy" in str(complaint) for complaint in browser.complaints)
