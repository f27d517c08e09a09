"""The interactive view in a browser: its numbers are those of the analyses, and its links lead to events and back."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from stack_profile.analyses.ops import GROUPINGS, ops
from stack_profile.analyses.overview import overview
from stack_profile.analyses.roofline import roofline
from stack_profile.exports import write
from stack_profile.report.page import page, sections
from stack_profile.traces.intervals import nesting, self_times
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

CELL = "cell.dataset.value === undefined ? null : Number(cell.dataset.value)"
TABLE = f"""JSON.stringify([...document.querySelectorAll('.panel table.sums tbody tr')].map(row => [...row.cells].map(
  cell => cell.className === 'number' ? ({CELL}) : cell.textContent)))"""
STATUS = "document.querySelector('#instrument [role=status]').textContent"
PIXELS = """(() => { const canvas = document.querySelector('.lanes canvas'); const found = new Set();
  const { data } = canvas.getContext('2d').getImageData(200, 0, canvas.width - 200, canvas.height);
  for (let i = 0; i < data.length; i += 4) found.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
  return [...found]; })()"""
LEGEND = "[...document.querySelectorAll('.legend .swatch')].map(each => getComputedStyle(each).backgroundColor)"
NAMELESS = """[...document.querySelectorAll('#instrument :is(button, select, input, canvas)')].filter(each =>
  !(each.textContent || each.title || each.ariaLabel || each.ariaHidden || each.closest('label'))).length"""
LISTING = f"""JSON.stringify([...document.querySelectorAll('.listing tbody tr')].map(row => [Number(row.dataset.line),
  ...[...row.cells].slice(0, 4).map(cell => {CELL}), row.querySelector('.code').textContent]))"""
FLAME = """JSON.stringify([...document.querySelectorAll('.flame button')].map(each =>
  [each.dataset.name, Number(each.dataset.total), Number(each.dataset.self)]))"""
PICOSECOND = 1e-12


@pytest.fixture(scope="module")
def report(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write([page(trace, list(sections(trace)), limit=0)], path)
    return path


def table(browser):
    return json.loads(browser.evaluate(TABLE))


def canvas(browser):
    left, top, width = browser.evaluate(
        "(() => { const box = document.querySelector('.lanes canvas').getBoundingClientRect();"
        "return [box.left, box.top, box.width]; })()"
    )
    return left, top, width


def window(browser):
    browser.wait_for("/[#&]t=/.test(location.hash)")
    return [int(each) for each in re.search(r"[#&]t=(-?\d+)-(-?\d+)", browser.evaluate("location.hash")).groups()]


@pytest.mark.parametrize("by", ["op", "line", "file", *(each for each in GROUPINGS if each != "op")])
def test_totals_are_the_numbers_of_the_analysis(browser, report, trace, by):
    browser.open(report, f"#by={by}")
    short = short_paths(trace).text
    expected = {short(row.name) or "(none)": row for row in ops(trace, by=by).rows if row.occurrences}
    found = {row[0]: row for row in table(browser)}
    assert found.keys() == expected.keys()
    for name, (_, self_s, share, occurrences, *_) in found.items():
        row = expected[name]
        assert self_s == pytest.approx(row.self_s, rel=1e-9, abs=1e-15)
        assert share == pytest.approx(row.busy_share, rel=1e-9, abs=1e-15)
        assert occurrences == row.occurrences
    assert browser.complaints == []


def test_totals_by_kernel_are_the_numbers_of_the_analysis(browser, h100_train, tmp_path, report):
    write([page(h100_train, [])], tmp_path / "gpu.html")
    browser.open(tmp_path / "gpu.html", "#by=kernel")
    expected = {row.name: row.self_s for row in ops(h100_train, by="kernel").rows if row.self_s}
    found = {row["kernel"]: row["self"] for row in browser.rows() if row["self"]}
    assert found == pytest.approx(expected, rel=1e-6)
    assert "kernel" in browser.values(".panel select option", "each.value")
    browser.open(report)
    assert "kernel" not in browser.values(".panel select option", "each.value"), "a CPU has none"


def test_totals_have_the_flops_and_bytes_of_the_roofline(browser, report, trace):
    browser.open(report)
    expected = {f"{row.program}: {row.name}": (row.flops, row.traffic_bytes) for row in roofline(trace).rows}
    assert {row[0]: tuple(row[4:6]) for row in table(browser)} == expected
    assert any(flops for flops, _ in expected.values())


def test_every_cell_of_the_plain_tables_is_the_number_of_its_row(browser, report, trace):
    browser.open(report)
    for section in sections(trace):
        cells = json.loads(browser.evaluate(
            f"JSON.stringify([...document.querySelectorAll('#{section.name} tbody tr')].map(row => [...row.cells].map("
            f"cell => {CELL})))"
        ))  # fmt: skip
        rows = section.answer.rows
        columns = [name for name in section.answer.columns if any(getattr(row, name) not in (None, "") for row in rows)]
        assert len(cells) == len(rows)
        for found, row in zip(cells, rows, strict=True):
            values = [getattr(row, name) for name in columns]
            numbers = [value if isinstance(value, int | float) else None for value in values]
            assert found == numbers


def test_dragging_selects_a_time_whose_sums_are_of_the_parts_of_events_in_it(browser, report, trace):
    browser.open(report)
    left, top, width = canvas(browser)
    address = browser.changed(lambda: browser.drag((left + 0.4 * width, top + 60), (left + 0.6 * width, top + 60)))
    start, end = (int(each) for each in re.search(r"[#&]s=(\d+)-(\d+)", address).groups())
    (device,) = trace.devices
    rows = np.flatnonzero((device.end_ps > start) & (device.start_ps < end))
    begins, ends = device.start_ps[rows].clip(start), device.end_ps[rows].clip(max=end)
    depth = np.full(len(rows), -1)
    outer = np.array([each.is_container for each in device.operations])[device.which[rows]]
    depth[outer] = nesting(begins[outer], ends[outer])
    expected = np.bincount(device.which[rows], self_times(begins, ends, depth), len(device.operations)) * PICOSECOND
    names = [f"{each.module}: {each.name}" for each in device.operations]
    found = {row[0]: row[1] for row in table(browser)}
    assert 0 < sum(found.values()) < 0.5 * device.busy_s
    assert sum(found.values()) == pytest.approx(expected.sum(), rel=1e-6)
    # The address has whole picoseconds, the page what the mouse selected.
    assert found == pytest.approx({name: expected[names.index(name)] for name in found}, rel=1e-6, abs=1e-11)


def test_a_step_is_the_selection_and_a_device_is_a_filter(browser, report, trace):
    (device,) = trace.devices
    step = overview(trace).rows[1]
    browser.open(report, f"#device={device.device}&step={step.step_number}")
    assert sum(row[1] for row in table(browser)) == pytest.approx(step.busy_s, rel=1e-6)
    browser.open(report, "#device=host%20vm")
    assert table(browser) == []


def test_a_search_counts_and_marks_its_events_and_goes_through_them_in_order(browser, report, trace):
    (device,) = trace.devices
    name = device.operations[int(np.argmax(device.sums(device.self_ps)))].name
    browser.open(report, f"#q={name.upper()}")
    matching = [name in each.name for each in device.operations]
    expected = int(np.count_nonzero(np.array(matching)[device.which]))
    assert browser.evaluate(STATUS).startswith(f"{expected} of ")
    starts = []
    browser.evaluate("document.querySelector('.lanes canvas').focus()")
    for _ in range(3):
        event = browser.changed(lambda: browser.press("n"))
        starts.append(int(re.search(r"event=(\d+)", event)[1]))
    assert starts == sorted(set(starts))
    assert f"event={starts[1]}" in browser.changed(lambda: browser.press("p")).split("&")
    drawn = set(browser.evaluate(LEGEND)) & set(browser.evaluate(PIXELS))
    assert len(drawn) == 1, "only the category of the match has its full colour"


def test_keys_and_the_wheel_zoom_and_pan_the_window(browser, report):
    browser.open(report)
    browser.changed(lambda: browser.press("w"))
    first = window(browser)
    browser.changed(lambda: browser.press("d"))
    second = window(browser)
    assert second[1] - second[0] == pytest.approx(first[1] - first[0], rel=1e-6) and second[0] > first[0]
    browser.changed(lambda: browser.press("a"))
    assert window(browser) == pytest.approx(first, rel=1e-6)
    left, top, width = canvas(browser)
    x = left + 0.75 * width
    browser.changed(lambda: browser.mouse("mouseWheel", x, top + 60, deltaX=0, deltaY=-120))
    third = window(browser)
    assert third[1] - third[0] < 0.9 * (first[1] - first[0])
    share = (0.75 * width - 176) / (width - 176)
    at = [each[0] + share * (each[1] - each[0]) for each in (first, third)]
    assert at[0] == pytest.approx(at[1], rel=1e-3), "the time at the pointer stays there"
    browser.changed(lambda: browser.press("s"))
    assert browser.changed(lambda: browser.press("0")) == ""


def test_a_link_opens_the_same_view(browser, report):
    browser.open(report, "#by=category")
    browser.changed(lambda: browser.press("w", "w", "d"))
    address = browser.changed(lambda: browser.evaluate("document.querySelector('.sums button.link').click()"))
    assert re.fullmatch(r"#t=\d+-\d+&category=[\w ]+&by=category", address)
    chips = "document.querySelector('.chips').textContent"
    before = table(browser), browser.evaluate(chips)
    browser.open(report, browser.evaluate("location.hash"))
    assert (table(browser), browser.evaluate(chips)) == before and len(before[0]) == 1
    assert unquote(browser.evaluate("location.hash")) == address


@pytest.mark.parametrize(
    "address",
    ["#device=TPU:7", "#step=77", "#event=99999999", "#t=9-1", "#s=9000000000000000-9000000000000001", "#t=a&=&%"],
)
def test_an_address_of_what_the_capture_lacks_opens_the_whole(browser, report, address):
    browser.open(report, f"{address}{'&' if '=' in address else '#'}by=category")
    assert sum(row[2] for row in table(browser)) == pytest.approx(1)
    assert browser.evaluate("document.querySelector('.chips').textContent") == "" and browser.complaints == []


def test_rows_of_tables_lead_to_their_events_and_events_to_their_rows(browser, report, trace):
    browser.open(report)
    linked = json.loads(browser.evaluate(
        "JSON.stringify(Object.fromEntries([...document.querySelectorAll('main > section')].map(section => [section.id,"
        "[section.querySelectorAll('tbody tr').length, section.querySelectorAll('tr[data-events] a').length]])))"
    ))  # fmt: skip
    for name in ("overview", "ops", "timeline", "roofline"):
        rows, links = linked[name]
        assert rows == links > 0, name
    assert linked["memory"][1] > 0 and linked["graph"][1] > 0
    row = roofline(trace).rows[0]
    browser.changed(lambda: browser.evaluate("document.querySelector('#roofline tbody a').click()"))
    (only,) = table(browser)
    assert only[0] == f"{row.program}: {row.name}" and only[1] == pytest.approx(row.self_s)
    browser.evaluate("[...document.querySelectorAll('[role=tab]')].find(each => each.textContent === 'Event').click()")
    assert row.name in browser.evaluate("document.querySelector('.facts').textContent")
    browser.evaluate(
        "[...document.querySelectorAll('.panel p button')].find(each => each.textContent === 'roofline').click()"
    )
    assert browser.evaluate("document.querySelector('tr.found').closest('section').id") == "roofline"
    assert browser.evaluate("document.activeElement.textContent") == row.name


def test_the_source_has_the_time_flops_and_bytes_of_each_line(browser, report, trace):
    browser.open(report, "#tab=source")
    name = browser.evaluate("document.querySelector('.panel select').value")
    file = ops(trace, by="file").rows[0].name
    assert short_paths(trace).file(file) == name
    listing = json.loads(browser.evaluate(LISTING))
    assert [text for *_, text in listing] == Path(file).read_text().splitlines()
    expected = {row.name.rpartition(":")[2]: row.self_s for row in ops(trace, by="line").rows if row.name}
    found = {str(line): self_ps * PICOSECOND for line, self_ps, *_ in listing if self_ps}
    assert found == pytest.approx(expected)
    costs = [(row.line.rpartition(":")[2], row.flops, row.traffic_bytes) for row in roofline(trace).rows if row.line]
    for place, column in ((3, 1), (4, 2)):
        sums = dict.fromkeys((line for line, *_ in costs), 0)
        for row in costs:
            sums[row[0]] += row[column] or 0
        assert {str(row[0]): row[place] for row in listing if row[place]} == {k: v for k, v in sums.items() if v}
    # A line further out has the time of the lines that it calls.
    inside, around = (next(n for n, *_, text in listing if part in text) for part in ("jnp.tanh(x @ up)", "lax.scan("))
    totals = {line: total for line, _, total, *_ in listing}
    assert totals[around] >= totals[inside] > 0
    events = totals[around] * PICOSECOND
    click = f"document.querySelector('.listing tr[data-line=\"{around}\"] button').click()"
    assert f"frame={name}:{around}" in browser.changed(lambda: browser.evaluate(click))
    browser.evaluate("[...document.querySelectorAll('[role=tab]')].find(each => each.textContent === 'Ops').click()")
    assert sum(row[1] for row in table(browser)) == pytest.approx(events)


def test_a_source_that_changed_since_the_capture_is_marked(browser, trace, tmp_path):
    (file,) = (row.name for row in ops(trace, by="file").rows if row.name.endswith("conftest.py"))
    about = {**trace.about, "sources": {**trace.about["sources"], file: "0" * 64}}
    write([page(dataclasses.replace(trace, about=about), [])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#tab=source")
    assert "changed since the capture" in browser.evaluate("document.querySelector('.panel .failure').textContent")
    write([page(trace, [])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#tab=source")
    assert browser.evaluate("document.querySelector('.panel .failure')") is None


@pytest.mark.parametrize("by", ["scope", "stack"])
def test_the_flame_view_divides_the_busy_time(browser, report, trace, by):
    browser.open(report, f"#tab=flame&flame={by}")
    (root, *nodes) = json.loads(browser.evaluate(FLAME))
    assert root[1] * PICOSECOND == pytest.approx(trace.devices[0].busy_s) and root[2] == 0
    if by == "scope":
        scopes = {row.name: row.self_s for row in ops(trace, by="scope").rows}
        assert next(total for name, total, _ in nodes if name == "mlp") * PICOSECOND == pytest.approx(scopes["mlp"])
        click = "[...document.querySelectorAll('.flame button')].find(each => each.dataset.name === 'mlp').click()"
        browser.evaluate(click)
        assert "under=jit_step/mlp" in browser.changed(lambda: browser.evaluate(click))
        assert browser.evaluate("document.querySelector('.panel .help').textContent").count(" of ") == 1
    else:
        assert any(name.startswith("loss") and "conftest.py:" in name for name, *_ in nodes)
    widths = browser.evaluate(
        "[...document.querySelectorAll('.flame button')].map(each => each.offsetLeft + each.offsetWidth)"
    )
    assert max(widths) <= browser.evaluate("document.querySelector('.flame').offsetWidth") + 1


def test_the_keyboard_reaches_events_and_a_reader_hears_them(browser, report):
    browser.open(report)
    browser.evaluate("document.querySelector('.lanes canvas').focus()")
    addresses = [browser.changed(functools.partial(browser.press, key)) for key in ("Enter", "ArrowRight", "ArrowDown")]
    assert len(set(addresses)) == 3
    assert re.search(r", .+ at .+", browser.evaluate(STATUS))
    browser.press("Escape")
    browser.wait_for("location.hash === ''")
    assert browser.evaluate(NAMELESS) == 0


def test_no_table_is_cut_at_the_edge(browser, report):
    browser.open(report)
    cut = browser.evaluate(
        "[...document.querySelectorAll('.wide, .panel .scroll')].filter(each => each.scrollWidth > each.clientWidth)"
        ".map(each => each.closest('section')?.id)"
    )
    assert cut == []
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 1280


def test_no_name_of_a_trace_becomes_an_element_of_the_view(browser, build, tmp_path):
    name = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
    plane = build.plane(f"/device:GPU:0 {name}")
    plane.line(
        "Stream #1", *(plane.event(name, 100 * at, 20, hlo_op=name, hlo_module=name, program_id=1) for at in range(4))
    )
    host = build.plane("/host:CPU")
    host.line(name, host.event(f"PjitFunction({name})", 0, 50), host.event(name, 20, 70))
    trace = trace_of([read_space(build.space(plane, host, host=name))])
    write([page(trace, list(sections(trace)))], tmp_path / "page.html")
    for tab in ("ops", "event", "source", "roofline", "memory", "graph", "communication", "input", "compile", "flame"):
        browser.open(tmp_path / "page.html", f"#tab={tab}&event=0")
        assert browser.evaluate("document.querySelector('#instrument img, #instrument script')") is None
        assert browser.evaluate("document.title").startswith("Profile of ") and browser.complaints == []
    assert name in browser.evaluate("document.querySelector('.flame').textContent")


def test_an_empty_trace_has_a_sentence_instead_of_a_timeline(browser, build, tmp_path):
    empty = trace_of([read_space(build.space(build.plane("/host:CPU")))])
    write([page(empty, list(sections(empty)))], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert "no events" in browser.evaluate("document.querySelector('#instrument').textContent")
    assert browser.complaints == []


def test_events_beyond_the_limit_are_left_out_the_shortest_first_and_it_says_so(browser, trace, tmp_path):
    write([page(trace, [], events=50)], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.evaluate(STATUS) == "50 events"
    assert "events are left out" in browser.evaluate("document.querySelector('#instrument .failure').textContent")


def test_print_has_the_plain_version(browser, report):
    browser.open(report)
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.evaluate("getComputedStyle(document.querySelector('#instrument')).display") == "none"
        assert browser.evaluate("document.querySelector('#ops table').offsetHeight") > 0
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


EVENTS = 100_000
RECORD = """(() => { window.frames = 0; const next = () => {
  window.frames += 1; if (window.frames < 400) requestAnimationFrame(next); };
  requestAnimationFrame(next); })()"""


@pytest.mark.slow
def test_a_hundred_thousand_events_zoom_and_pan_at_sixty_frames_a_second(browser, build, tmp_path):
    planes = []
    for device in range(8):
        plane = build.plane(f"/device:GPU:{device}")
        about = {"hlo_module": "jit_step", "program_id": 1}
        names = (f"fusion.{number % 200}" for number in range(EVENTS // 8))
        events = [plane.event(name, 5 * at, 3 + at % 3, hlo_op=name, **about) for at, name in enumerate(names)]
        plane.line("Stream #1", *events)
        planes.append(plane)
    write([page(trace_of([read_space(build.space(*planes))]), [])], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    browser.open(tmp_path / "page.html", "#q=fusion.1")  # some of the events are highlighted
    left, top, width = canvas(browser)
    with browser.thread_time() as spent:
        browser.evaluate(RECORD)
        for number in range(60):
            across, down = (0, (-40, 40)[number % 2]) if number < 30 else (30, 0)
            browser.mouse("mouseWheel", left + 0.6 * width, top + 60, deltaX=across, deltaY=down)
    assert browser.evaluate("window.frames") > 30 and spent[0] < 60 / 60  # a frame for each turn of the wheel
