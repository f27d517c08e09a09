"""Each view of the page in a browser has the numbers of its analysis, for the whole capture and for a step."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_profile.analyses.advice import advice
from stack_profile.analyses.communication import communication
from stack_profile.analyses.compile import compilations
from stack_profile.analyses.graph import graph
from stack_profile.analyses.input_pipeline import input_pipeline
from stack_profile.analyses.memory import memory
from stack_profile.analyses.overview import overview
from stack_profile.analyses.roofline import roofline
from stack_profile.exports import write
from stack_profile.report import views
from stack_profile.report.page import page, sections
from stack_profile.traces.allocator import AllocatorHistory
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space

EXAMPLES = Path(__file__).parents[4] / "examples" / "plugins"
NAMELESS = """[...document.querySelectorAll('#instrument :is(button, select, input, canvas, [role=button])')].filter(
  each => !(each.textContent || each.title || each.ariaLabel || each.ariaHidden || each.closest('label'))).length"""


DARK_PIXELS = """(() => { const canvas = document.querySelector('.lanes canvas');
  const { data } = canvas.getContext('2d').getImageData(400, 20, 200, canvas.height - 20);
  return data.filter((each, i) => i % 4 === 0 && each < 130).length; })()"""


def written(trace, folder):
    write([page(trace, list(sections(trace)))], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def report(trace, tmp_path_factory):
    return written(trace, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    """A capture of a loop that waits for its input and compiles one function for two shapes."""
    step, other = jax.jit(lambda x: jnp.tanh(x @ x)), jax.jit(lambda x: jnp.sum(x * 2))
    x = jax.block_until_ready(step(jnp.ones((128, 128))))
    shapes = [jnp.ones((3 + number, 5)) for number in range(2)]
    folder = tmp_path_factory.mktemp("looped")
    with stack_profile.capture(folder) as captured:
        for number in range(5):
            with jax.profiler.TraceAnnotation("next_batch"):
                time.sleep(0.002)
            x = jax.block_until_ready(step(x))
            if number in (1, 3):
                other(shapes[number // 2]).block_until_ready()
    captured.wait()
    return load_trace(folder)


@pytest.fixture(scope="module")
def tpu_report(tpu_trace, tmp_path_factory):
    return written(tpu_trace, tmp_path_factory.mktemp("tpu_report"))


@pytest.fixture(scope="module")
def looped_report(looped, tmp_path_factory):
    return written(looped, tmp_path_factory.mktemp("looped_report"))


def test_the_roofline_has_the_numbers_of_the_analysis(browser, report, trace):
    browser.open(report, "#tab=roofline")
    answer = roofline(trace)
    expected = {f"{row.program}: {row.name}": row for row in answer.rows}
    found = browser.rows()
    assert [row["name"] for row in found] == [f"{row.program}: {row.name}" for row in answer.rows], "in the same order"
    titles = {
        "FLOPs": "flops", "bytes": "traffic_bytes", "FLOP/s": "rate_flops_s", "B/s": "rate_bytes_s",
        "FLOPs per byte": "intensity", "ideal": "ideal_s", "ideal % of self": "ideal_self_share", "self": "self_s",
    }  # fmt: skip
    for row in found:
        for name, field in titles.items():
            value = getattr(expected[row["name"]], field)
            assert row[name] == (None if value is None else pytest.approx(value, rel=1e-9))
        assert row["bound"] == (expected[row["name"]].bound or "")
    drawn = [row for row in answer.rows if row.flops and row.traffic_bytes and row.self_s]
    dots = browser.values(".chart .dot", "each.ariaLabel")
    assert [text.partition(",")[0] for text in dots] == [f"{row.program}: {row.name}" for row in drawn]
    peaks = browser.evaluate("document.querySelector('.chart').textContent")
    assert all(dtype in peaks for dtype in answer.facts["peak_flops_s"]) and "memory" in peaks
    click = "document.querySelector('.chart .dot').dispatchEvent(new MouseEvent('click'))"
    assert f"op={drawn[0].program}: {drawn[0].name}" in browser.changed(lambda: browser.evaluate(click))
    assert [row["name"] for row in browser.rows()] == [f"{drawn[0].program}: {drawn[0].name}"]


def test_the_roofline_of_lines_and_of_a_step_sums_its_operations(browser, report, trace):
    browser.open(report, "#tab=roofline&points=line")
    sums = {}
    for row in roofline(trace).rows:
        line = short_paths(trace).text(row.line) or "(none)"
        sums[line] = sums.get(line, 0) + (row.flops or 0)
    assert {row["line"]: row["FLOPs"] or 0 for row in browser.rows()} == sums
    step = overview(trace).rows[1]
    browser.open(report, f"#tab=roofline&device={step.device}&step={step.step_number}")
    found = browser.rows()
    assert sum(row["self"] for row in found) == pytest.approx(step.busy_s, rel=1e-6)
    assert sum(row["FLOPs"] or 0 for row in found) == pytest.approx(
        sum(sums.values()) / len(overview(trace).rows), rel=0.1
    )


@pytest.mark.parametrize("by", ["buffer", "line", "layer", "kind"])
def test_the_memory_view_has_the_arrays_of_the_analysis(browser, report, trace, by):
    browser.open(report, f"#tab=memory&arrays={by}")
    answer, short = memory(trace, by=by), short_paths(trace).text
    expected = sorted((short(row.name) or "(none)", row.size_bytes, row.buffers) for row in answer.rows)
    title = "array" if by == "buffer" else by
    found = browser.rows()
    assert sorted((row[title], row["size"], row["buffers"]) for row in found) == expected
    assert [row["% of total"] for row in found] == pytest.approx([row.total_share for row in answer.rows])
    if by == "buffer":
        assert {row["line"] for row in found} == {short(row.line) for row in answer.rows}
    facts = dict(browser.values("[data-fact]", "[each.dataset.fact, Number(each.dataset.value)]"))
    assert facts == {name: value for name, value in answer.facts.items() if name.endswith("_bytes")}
    assert f"at {answer.facts['peak_at']}" in browser.evaluate("document.querySelector('.chart').textContent")


def test_the_history_of_an_allocator_is_drawn_for_its_device_and_time(browser, build, tmp_path):
    host, device = build.plane("/host:CPU"), build.plane("/device:GPU:0")
    device.line("Stream #1", device.event("fusion", 0, 900, hlo_op="fusion", hlo_module="jit_f", program_id=1))
    sizes = ((100, 1024), (300, 4096), (500, 2048))
    host.line("python", *(
        host.event("MemoryAllocation", at, 0, allocator_name="GPU_0_bfc", bytes_allocated=size, bytes_available=10_000,
                   peak_bytes_in_use=8192) for at, size in sizes
    ))  # fmt: skip
    trace = trace_of([read_space(build.space(device, host))])
    write([page(trace, [])], tmp_path / "page.html")
    text = "document.querySelector('.panel .drawing')?.textContent ?? ''"
    browser.open(tmp_path / "page.html", "#tab=memory")
    assert "GPU_0_bfc" in browser.evaluate(text)
    assert "3 states in this range: 1 KiB to 4 KiB in use; at most 8 KiB" in browser.evaluate(text)
    browser.open(tmp_path / "page.html", "#tab=memory&s=400000000-600000000")
    assert "2 states in this range: 2 KiB to 4 KiB" in browser.evaluate(text)
    assert browser.complaints == []


@pytest.mark.parametrize("by", ["op", "kind", "axis", "line", "layer"])
def test_communication_has_the_numbers_of_the_analysis(browser, tpu_trace, tpu_report, by):
    browser.open(tpu_report, f"#tab=communication&collectives={by}")
    short, answer = short_paths(tpu_trace).text, communication(tpu_trace, by=by)
    expected = {short(row.name) or "(none)": row for row in answer.rows}
    titles = {
        "occurrences": "occurrences", "array": "array_bytes", "sent": "sent_bytes", "time": "time_s", "wait": "wait_s",
        "exposed": "exposed_s", "hidden": "hidden_s", "exposed % of busy": "exposed_busy_share", "B/s": "rate_bytes_s",
        "% of link": "link_share",
    }  # fmt: skip
    found = {row["name" if by == "op" else by]: row for row in browser.rows()}
    assert found.keys() == expected.keys()
    for name, row in found.items():
        for title, field in titles.items():
            assert row[title] == pytest.approx(getattr(expected[name], field), rel=1e-9, abs=1e-15), (name, title)
        if by == "op":
            assert (row["kind"], row["axis"]) == (expected[name].kind, expected[name].axis)
    assert browser.complaints == []


def test_communication_of_one_device_and_step_is_a_part(browser, tpu_trace, tpu_report):
    browser.open(tpu_report, "#tab=communication&device=TPU%3A0")
    expected = {row.name: row.wait_s for row in communication(tpu_trace, device="TPU:0").rows}
    assert {row["name"]: row["wait"] for row in browser.rows()} == pytest.approx(expected)
    browser.open(tpu_report, "#tab=communication&device=TPU%3A0&step=1")
    assert {row["occurrences"] for row in browser.rows()} == {1}
    click = "document.querySelector('.sums button.link').click()"
    assert "event=" in browser.changed(lambda: browser.evaluate(click))
    assert browser.evaluate("document.querySelector('[role=tab][aria-selected=true]').textContent") == "Communication"


def test_compilations_have_the_numbers_of_the_analysis_and_lead_to_their_events(browser, looped, looped_report):
    browser.open(looped_report, "#tab=compile")
    answer = compilations(looped)
    expected = [
        (row.name or "(unknown)", row.programs, row.compilations, row.compile_s, row.why) for row in answer.rows
    ]
    found = browser.rows()
    columns = ("function", "programs", "compilations", "compile time", "differences of their arguments")
    assert [row["function"] for row in found] == [name for name, *_ in expected]
    assert any(row["differences of their arguments"] for row in found)
    assert all(name for name, *_ in expected)
    for row, values in zip(found, expected, strict=True):
        assert [row[name] for name in columns] == [pytest.approx(v) if isinstance(v, float) else v for v in values]
    click = "document.querySelector('.sums button.link').click()"
    browser.changed(lambda: browser.evaluate(click))
    assert found[0]["function"] in browser.evaluate("document.querySelector('#instrument [role=status]').textContent")


def test_the_input_view_has_the_numbers_of_the_analysis(browser, looped, looped_report):
    browser.open(looped_report, "#tab=input")
    answer = input_pipeline(looped)
    assert answer.facts["input_waited_s"] > 0
    titles = {
        "threads": "threads", "calls": "calls", "self": "self_s", "self per call": "call_self_s", "waited": "waited_s",
        "waited % of steps": "waited_steps_share", "with an idle device": "idle_s",
        "idle % of steps": "idle_steps_share",
    }  # fmt: skip
    expected = {row.stage: row for row in answer.rows}
    found = {row["stage"]: row for row in browser.rows()}
    assert found.keys() == expected.keys()
    for name, row in found.items():
        for title, field in titles.items():
            assert row[title] == pytest.approx(getattr(expected[name], field), rel=1e-9, abs=1e-15), (name, title)
    browser.open(looped_report, "#tab=input&step=2")
    (waited,) = (row["waited"] for row in browser.rows() if row["stage"] == "next_batch")
    assert 0 < waited < expected["next_batch"].waited_s


@pytest.mark.parametrize(("depth", "heavy"), [(1, 0), (2, 0), (1, 2), (2, 5)])
def test_the_graph_has_the_instructions_of_the_analysis(browser, report, trace, depth, heavy):
    row = roofline(trace).rows[heavy]
    node = f"&node={row.program}: {row.name}" if heavy else ""
    browser.open(report, f"#tab=graph&depth={depth}{node}")
    answer = graph(trace, depth=depth, op=row.name if heavy else None)
    short = short_paths(trace).text
    expected = {
        row.name: (
            row.distance, row.opcode, row.shape, row.result_bytes, row.flops, row.traffic_bytes,
            None if row.self_s is None else pytest.approx(row.self_s), row.occurrences, short(row.line),
        )
        for row in answer.rows
    }  # fmt: skip
    names = ("distance", "opcode", "shape", "result", "FLOPs", "bytes", "self", "occurrences", "line")
    found = {row["name"]: tuple(row[name] for name in names) for row in browser.rows()}
    assert found == expected
    relations = {row["name"]: row["relation"] for row in browser.rows()}
    assert relations[answer.facts["instruction"]] == "itself"
    assert {name for name, relation in relations.items() if relation.startswith("in ")} == {
        row.name for row in answer.rows if row.fusion
    }
    drawn = browser.values(".graph .node", "each.ariaLabel")
    assert any(text.startswith(f"{answer.facts['instruction']}, ") for text in drawn)


def test_the_graph_follows_a_click_and_draws_the_inside_of_a_fusion(browser, report, trace):
    rows = graph(trace, depth=1, fusions=False).rows
    other = next(row for row in rows if row.distance < 0)
    browser.open(report, "#tab=graph&depth=1")
    node = f"[...document.querySelectorAll('.graph .node')].find(each => each.ariaLabel.startsWith('{other.name}, '))"
    address = browser.changed(lambda: browser.evaluate(f"{node}.dispatchEvent(new MouseEvent('click'))"))
    assert f": {other.name}" in address and "node=" in address
    assert next(row["name"] for row in browser.rows() if row["relation"] == "itself") == other.name
    fusion = next(row for row in graph(trace, depth=4).rows if row.fusion and row.operands)
    program = graph(trace).facts["program"]
    browser.open(report, f"#tab=graph&node={program}: {fusion.fusion}")
    assert len(browser.values(".drawing", "each")) == 2
    inside = browser.values(".drawing:last-of-type .node", "each.ariaLabel")
    assert any(text.startswith(f"{fusion.name}, ") for text in inside)


def test_arrows_lead_from_a_dispatch_to_its_operations_and_back(browser, build, tmp_path):
    host, device = build.plane("/host:CPU"), build.plane("/device:GPU:0")
    host.line("python", host.event("launch", 0, 50, correlation_id=4))
    about = {"hlo_module": "jit_f", "program_id": 1, "correlation_id": 4}
    device.line(
        "Stream #1", *(device.event(name, at, 20, hlo_op=name, **about) for name, at in (("dot", 200), ("add", 300)))
    )
    trace = trace_of([read_space(build.space(device, host))])
    write([page(trace, [])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#tab=event&event=2")
    text = "document.querySelector('.panel').textContent"
    assert "Dispatched by launch300 us before it starts" in browser.evaluate(text)
    link = (
        "[...document.querySelectorAll('.panel p button.link')].find(each => each.textContent.startsWith('{}')).click()"
    )
    assert "event=3" in browser.changed(lambda: browser.evaluate(link.format("launch")))
    assert "Dispatches dot on GPU:0, 200 us later" in browser.evaluate(text)
    drawn = browser.evaluate(DARK_PIXELS)
    assert "event=1" in browser.changed(lambda: browser.evaluate(link.format("dot")))
    browser.open(tmp_path / "page.html", "#device=GPU%3A0")
    assert drawn > browser.evaluate(DARK_PIXELS), "the arrow goes with the host's lane"


def test_the_memory_of_an_allocator_is_a_lane(browser, build, tmp_path):
    host, device = build.plane("/host:CPU"), build.plane("/device:GPU:0")
    device.line("Stream #1", device.event("fusion", 0, 900, hlo_op="fusion", hlo_module="jit_f", program_id=1))
    about = {"allocator_name": "GPU_0_bfc", "bytes_available": 9, "peak_bytes_in_use": 4096}
    sizes = ((0, 1024), (450, 4096))
    events = (host.event("MemoryAllocation", at, 0, bytes_allocated=size, **about) for at, size in sizes)
    host.line("python", *events)
    write([page(trace_of([read_space(build.space(device, host))]), [])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    box, tip = (f"document.querySelector('{each}')" for each in (".lanes canvas", ".timeline .tip"))
    left, top, width = (browser.evaluate(f"{box}.getBoundingClientRect().{side}") for side in ("left", "top", "width"))
    for share, size in ((0.25, "1 KiB"), (0.75, "4 KiB")):
        browser.mouse("mouseMoved", left + 176 + share * (width - 176), top + 20 + 19 + 15)
        browser.wait_for(f"{tip}.textContent.startsWith('{size}')")
        assert browser.evaluate(f"{tip}.hidden") is False
        assert browser.evaluate(f"{tip}.textContent") == f"{size} in use GPU_0_bfc"


def test_a_long_history_of_an_allocator_is_drawn(browser, build, tmp_path, monkeypatch):
    device = build.plane("/device:GPU:0")
    device.line("Stream #1", device.event("fusion", 0, 900, hlo_op="fusion", hlo_module="jit_f", program_id=1))
    states = np.arange(400_000)  # more than a call takes arguments in a browser
    history = AllocatorHistory("GPU:0", "GPU_0_bfc", states * 2000, 1024 + states, states, states)
    monkeypatch.setattr(views, "allocator_histories", lambda spaces, base_ns: [history])
    write([page(trace_of([read_space(build.space(device))]), [])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#tab=memory")
    assert "400,000 states in this range" in browser.evaluate("document.querySelector('.panel').textContent")
    assert browser.complaints == []


def test_the_advice_has_the_gains_of_the_analysis_and_links_to_events_and_lines(browser, looped, looped_report):
    browser.open(looped_report, "#tab=advice")
    rows = advice(looped).rows
    found = browser.values(".advice li", "[each.dataset.cause, Number(each.dataset.gain)]")
    assert found == [[row.cause, row.gain_s] for row in rows] and rows
    short = short_paths(looped).text
    texts = browser.values(".advice li", "each.textContent")
    assert all(short(row.evidence) in text and row.change in text for row, text in zip(rows, texts, strict=True))
    (place,) = (place for place, row in enumerate(rows) if row.cause == "slow input")
    click = f"document.querySelectorAll('.advice li')[{place}].querySelector('a').click()"
    assert "name=next_batch" in browser.changed(lambda: browser.evaluate(click))
    assert browser.evaluate("document.querySelector('#instrument [role=status]').textContent").startswith("next_batch")


def test_a_notebook_shows_the_report_in_a_frame(browser, trace, tmp_path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<body><div id=instrument data-ready=true></div>{trace._repr_html_()}</body>")
    browser.open(notebook)
    frame = browser.call("Page.getFrameTree")["frameTree"]["childFrames"][0]["frame"]["id"]
    world = browser.call("Page.createIsolatedWorld", frameId=frame)["executionContextId"]

    def inside(expression):
        answer = browser.call("Runtime.evaluate", expression=expression, contextId=world, returnByValue=True)
        return answer["result"].get("value")

    end = time.monotonic() + 30
    while not inside("document.querySelector('#instrument')?.dataset.ready"):
        assert time.monotonic() < end
        time.sleep(0.05)
    rows = roofline(trace).rows
    assert inside("document.querySelectorAll('.sums tbody tr').length") == len(rows)
    inside("document.querySelector('#roofline tbody a').click()")
    while inside("document.querySelectorAll('.sums tbody tr').length") != 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert browser.complaints == []


def test_a_strangers_analysis_gets_a_panel_with_table_and_chart_by_declaring_data(
    browser, trace, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(EXAMPLES / "analysis")
    entries = {entry.name: entry for entry in registries.analyses.entries()}
    entries["opcodes"] = Entry("opcodes", "acme_opcodes.opcodes:opcodes", "acme-opcodes")
    monkeypatch.setattr(registries, "analyses", Registry("analyses", lambda: (entries, {})), raising=False)
    browser.open(written(trace, tmp_path), "#tab=more&section=opcodes")
    expected = [[row.opcode, row.self_s, row.busy_share] for row in registries.analyses["opcodes"](trace).rows]
    cell = "cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value)"
    cells = f"[...each.cells].map(cell => {cell})"
    for place in (".panel .analysis tbody tr", "main #opcodes tbody tr"):
        assert browser.values(place, cells) == expected
    assert browser.values(".panel .analysis figcaption", "each.textContent") == ["Self time by opcode"]
    assert len(browser.values(".panel .analysis .bar", "each")) == len(expected)
    head = "document.querySelectorAll('.panel .analysis th button')[1]"
    browser.evaluate(f"{head}.click(), {head}.click()")
    found = [row[1] for row in browser.values(".panel .analysis tbody tr", cells)]
    assert found == sorted(row[1] for row in expected) and browser.complaints == []


def test_sorting_and_filtering_a_table_are_in_the_address(browser, report):
    browser.open(report, "#tab=roofline")
    head = "[...document.querySelectorAll('.sums th button')].find(each => each.textContent === 'FLOPs')"
    assert "sort=-flops" in browser.changed(lambda: browser.evaluate(f"{head}.click()"))
    flops = [row["FLOPs"] for row in browser.rows() if row["FLOPs"] is not None]
    assert flops == sorted(flops, reverse=True)
    browser.evaluate("document.querySelector('.panel input[type=search]').focus()")
    browser.press("d", "o", "t")
    browser.wait_for("location.hash.includes('rows=dot')")  # a slow machine also writes the address after one letter
    browser.drawn()
    found = browser.rows()
    assert found and all("dot" in f"{row['name']} {row['line']}" for row in found)
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Filter rows of roofline"
    browser.open(report, browser.evaluate("location.hash"))
    assert browser.rows() == found
    browser.open(report, "#tab=roofline&sort=flops")
    assert [row["FLOPs"] for row in browser.rows() if row["FLOPs"] is not None] == flops[::-1]


TABS = (
    "ops", "advice", "event", "source", "flame", "roofline", "memory", "graph", "communication", "input", "compile",
    "more",
)  # fmt: skip


@pytest.mark.parametrize("width", [1280, pytest.param(1920, marks=pytest.mark.slow)])
def test_every_tab_fits_the_screen_and_names_its_controls(browser, looped_report, width):
    for tab in TABS:
        browser.open(looped_report, f"#tab={tab}&event=0", width=width)
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width, tab
        cut = "[...document.querySelectorAll('.panel .scroll')].some(each => each.scrollWidth > each.clientWidth)"
        assert not browser.evaluate(cut), tab
        assert browser.evaluate(NAMELESS) == 0 and browser.complaints == [], tab
