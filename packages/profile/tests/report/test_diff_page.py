"""The page of a comparison in a browser: it has the numbers of `stack profile diff`, and links to both sides."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from stack_core.cli import main
from stack_profile.comparisons.diff import diff
from stack_profile.report.diff_page import diff_page

GROUPINGS = ("line", "op", "layer", "module", "category")
NUMBERS = ("before_s", "after_s", "change_s", "change_before_share", "low_s", "high_s", "own_change_s", "p")


def program(build, path, operations, *, longer):
    """Writes a trace of a program of two sorts, or three in the longer one."""

    def step(x):
        with jax.named_scope("first"):
            x = jnp.sort(x, axis=0)
        with jax.named_scope("second"):
            x = jnp.sort(x, axis=1)
        if longer:
            with jax.named_scope("third"):
                x = jnp.sort(x, axis=0)
        return x

    compiled = jax.jit(step).lower(jnp.ones((4, 8))).compile()
    names = re.findall(r"%(\S+) = [^=]* sort\(", compiled.as_text())
    times = dict(zip(names, operations, strict=True))
    path.write_bytes(build.steps(times, proto=build.hlo_proto(compiled)))


@pytest.fixture(scope="module")
def compared(build, tmp_path_factory):
    """A folder with traces before and after, of a sort that became slower and another that was added, and the page."""
    folder = tmp_path_factory.mktemp("compared")
    before = [[100, 110, 120, 105, 102, 104], [200, 210, 190, 205, 200, 200]]
    after = [[100, 112, 118, 105, 103, 104], [300, 310, 290, 305, 300, 300], [50] * 6]
    program(build, folder / "before.xplane.pb", before, longer=False)
    program(build, folder / "after.xplane.pb", after, longer=True)
    tokens = [str(folder / f"{name}.xplane.pb") for name in ("before", "after")]
    main(["profile", "diff", *tokens, "--report", str(folder / "diff.html")])
    return folder, tokens


def printed(capsys, tokens, by):
    main(["profile", "diff", *tokens, "--by", by, "--json"])
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("by", GROUPINGS)
def test_numbers_are_those_of_the_command(browser, compared, capsys, by):
    folder, tokens = compared
    browser.open(folder / "diff.html", f"#tab=changes&changes={by}")
    expected = printed(capsys, tokens, by)
    assert len(expected) > 1
    rows = browser.rows()
    titles = ("before", "after", "change", "% of before", "low", "high", "own change", "p")
    found = [[row.get(title) for title in titles] for row in rows]
    assert found == [[row[name] for name in NUMBERS] for row in expected]
    assert [(row["verdict"], row["matched"]) for row in rows] == [(row["verdict"], row["matched"]) for row in expected]
    plain = browser.values(f"#by_{by} tbody tr", "Number(each.cells[3].dataset.value)")
    assert plain == [row["change_s"] for row in expected]
    assert browser.complaints == []


def test_a_row_leads_to_its_events_and_lines_on_both_sides_and_back(browser, compared):
    folder, _ = compared
    browser.open(folder / "diff.html", "#tab=changes&changes=layer")
    row = "[...document.querySelectorAll('.panel tbody tr')].find(each => each.cells[0].textContent === 'second')"
    address = browser.changed(lambda: browser.evaluate(f"{row}.querySelector('button').click()"))
    assert "change=layer second" in address
    # Seven steps of either side have one execution.
    assert browser.evaluate("document.querySelector('#instrument [role=status]').textContent").startswith("14 of")
    browser.evaluate(f"[...{row}.querySelectorAll('button')].at(-1).click()")
    browser.wait_for("document.querySelector('.listing tr.found')")
    assert "jnp.sort(x, axis=1)" in browser.evaluate("document.querySelector('.listing tr.found .code').textContent")
    assert browser.evaluate("document.querySelector('.panel select').value").startswith("after: ")
    browser.press("n")
    browser.evaluate(
        "[...document.querySelectorAll('.tabs button')].find(each => each.textContent === 'Event').click()"
    )
    links = browser.values(".panel .controls button", "each.textContent")
    assert {"All of layer second", "by layer"} <= set(links)


FLAME = "[each.dataset.name, Number(each.dataset.total), Number(each.dataset.before), Number(each.dataset.after)]"


def test_the_flame_view_has_the_times_of_a_step_on_both_sides(browser, compared):
    folder, _ = compared
    micro = 1_000_000
    times = {"first": (120, 118), "second": (190, 290), "third": (0, 50)}
    total = [sum(each[side] for each in times.values()) for side in (0, 1)]
    for wide in ("after", "before"):
        side = ("before", "after").index(wide)
        browser.open(folder / "diff.html", f"#tab=flame&step=3&wide={wide}")
        found = {name: numbers for name, *numbers in browser.values(".flame button", FLAME)}
        shown = {name: each for name, each in times.items() if each[side]}
        assert found["step"] == [total[side] * micro, total[0] * micro, total[1] * micro]
        assert {name: found.get(name) for name in shown} == {
            name: [each[side] * micro, each[0] * micro, each[1] * micro] for name, each in shown.items()
        }
        gone = browser.values(".gone li", "[each.textContent.split(':')[0], Number(each.dataset.total)]")
        assert gone == ([] if wide == "after" else [["jit_step / third", 50 * micro]])
    # Red is for what grew, blue for what shrank.
    browser.open(folder / "diff.html", "#tab=flame&step=3")
    colours = dict(browser.values(".flame button", "[each.dataset.name, getComputedStyle(each).backgroundColor]"))
    channels = {name: [float(each) for each in re.findall(r"[\d.]+", colour)][-3:] for name, colour in colours.items()}
    assert channels["second"][0] > channels["second"][2] and channels["first"][0] < channels["first"][2]
    assert browser.complaints == []
    # The whole timeline has seven steps, the last two of which are equal; shown is their mean.
    browser.open(folder / "diff.html", "#tab=flame&wide=before&flame=stack")
    means = {name: numbers for name, *numbers in browser.values(".flame button", FLAME)}
    means = means["step"][1:]
    assert means == pytest.approx([(641 + 104 + 1205 + 200) / 7 * micro, (642 + 104 + 1805 + 300 + 350) / 7 * micro])


def test_a_step_starts_at_one_place_on_both_sides(browser, compared):
    folder, _ = compared
    starts = {}
    for step in (1, 3):
        browser.open(folder / "diff.html", f"#step={step}&q=step {step}")
        found = []
        for _ in range(2):
            browser.press("n")
            found.append(browser.evaluate("document.querySelector('#instrument [role=status]').textContent"))
        starts[step] = [re.search(r" at (.+), (before|after): CPU:0 steps$", text).groups() for text in found]
    for (before, _), (after, _) in starts.values():
        assert before == after
    assert [side for _, side in starts[3]] == ["before", "after"]
    assert starts[1][0] != starts[3][0]


def test_rows_of_a_kind_and_the_sorting_are_in_the_address(browser, compared):
    folder, _ = compared
    browser.open(folder / "diff.html", "#tab=changes&changes=layer&shown=appeared")
    assert [row["layer"] for row in browser.rows()] == ["third"]
    browser.open(folder / "diff.html", "#tab=changes&changes=layer&sort=-before_s")
    befores = [row["before"] for row in browser.rows()]
    assert befores == sorted(befores, reverse=True)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_as_wide_as_the_screen(browser, compared, width):
    folder, _ = compared
    browser.open(folder / "diff.html", width=width)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.requested == [(folder / "diff.html").as_uri()]


def test_the_gate_writes_the_page_and_prints_its_path(browser, compared, capsys):
    folder, tokens = compared
    with pytest.raises(SystemExit) as end:
        main(["profile", "gate", *tokens, "--report", str(folder / "gate.html"), "--json"])
    said = capsys.readouterr()
    assert end.value.code == 1 and str(folder / "gate.html") in said.err
    browser.open(folder / "gate.html")
    assert browser.values("main > section", "each.id")[:2] == ["gate", "by_line"]
    new = next(row["new"] for row in json.loads(said.out)["rows"] if row["metric"] == "step_time")
    cells = "[...each.cells].map(cell => Number(cell.dataset.value))"
    assert new in browser.values("#gate tbody tr", cells)[0]


def test_traces_without_steps_make_a_page_that_says_so(build):
    from stack_profile.traces.trace import trace_of
    from stack_profile.traces.xplane import read_space

    plane = build.plane("/host:CPU")
    plane.line("main", plane.event("PjitFunction(f)", 0, 10))
    trace = trace_of([read_space(build.space(plane))])
    assert diff([trace], [trace]).notes[0] in diff_page([trace], [trace])
