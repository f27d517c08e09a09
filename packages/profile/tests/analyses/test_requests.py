"""Requests are read from the marks of an engine, and the page has their phases as lanes.

integration_tests/test_profiled_requests.py compares them with the counters of a server.
"""

import time

import numpy as np
import pytest

import stack_profile
from stack_core.runtime.spans import record_span
from stack_profile.analyses.requests import requests
from stack_profile.exports import write
from stack_profile.report.events import recorded_events
from stack_profile.report.page import page
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace

NAME = "a#1,=\"{'é"  # characters of the profiler's own syntax


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two requests: one of a prompt of two steps and three tokens, the other began before and did not end."""
    with stack_profile.capture(tmp_path_factory.mktemp("out"), stacks_hz=0.0) as capture:
        record_span("queue", 0.5, request=NAME, index=0, prompt_tokens=12, cached_tokens=4)
        for prompt, tokens in ((5, 0), (3, 1), (0, 2)):
            time.sleep(0.01)
            record_span("engine_step", 0.01, rows=[(NAME, 0, prompt, tokens), ("b", 1, 0, 1)])
            if tokens:
                record_span("stream", 0.0, request=NAME, index=0, tokens=tokens, end="stop" if tokens == 2 else None)
        record_span("engine_step", 0.0, rows=[(NAME, 0, 0, 0)])  # launched ahead, after the end
    return load_trace(capture.wait())


def test_phases_and_rates(trace):
    answer = requests(trace)
    first, other = answer.rows
    assert (first.name, first.prompt_tokens, first.cached_tokens, first.generated_tokens) == (NAME, 12, 4, 3)
    assert (first.steps, first.end, other.end) == (3, "stop", "")
    assert first.queue_s == pytest.approx(0.5)
    assert first.prefill_s >= 0.02 and first.first_token_s >= 0.52
    assert first.tokens_per_s == pytest.approx(2 / first.decode_s)
    assert (other.name, other.generated_tokens, other.queue_s, other.first_token_s) == ("b (2)", 3, None, None)
    facts = answer.facts
    assert (facts["requests"], facts["finished"], facts["generated_tokens"]) == (2, 1, 6)
    assert facts["engine_steps"] == 4 and facts["rows_per_step"] == 7 / 4
    assert any("1 requests began before" in note for note in answer.notes)


def test_the_page_has_the_lanes(browser, trace, tmp_path):
    recorded = recorded_events(trace, short_paths(trace))
    lanes = [lane for lane in recorded.lanes if lane.type == "work"]
    assert [lane.name for lane in lanes] == ["engine steps", "requests"]
    names = [[recorded.kinds[kind]["name"] for kind in lane.kind.tolist()] for lane in lanes]
    assert names[0] == ["1 prefill, 1 decode", "1 prefill, 1 decode", "2 decode", "1 decode"]
    phases = [name.removeprefix(f"{NAME} ") for name in names[1] if name.startswith(NAME)]
    assert sorted(phases) == ["decode", "prefill", "prefill", "queue", "stream", "stream"]
    for lane in lanes:
        # Events of one row do not overlap.
        order = np.lexsort((lane.start_ps, lane.row))
        same = np.diff(lane.row[order]) == 0
        assert (lane.start_ps[order][1:] >= (lane.start_ps + lane.duration_ps)[order][:-1])[same].all()
    write([page(trace, [])], tmp_path / "report.html")
    event = sum(map(len, recorded.lanes[: recorded.lanes.index(lanes[1])]))
    browser.open(tmp_path / "report.html", f"#event={event}&tab=event")
    facts = browser.values(".panel .facts dd", "each.textContent")
    assert facts[0] == f"{NAME} queue" and facts[1].endswith(", requests")
    swatch = "[each.parentElement.textContent, getComputedStyle(each).backgroundColor]"
    legend = dict(browser.values(".legend .swatch", swatch))
    phases = ("queue", "prefill", "decode", "stream", "engine step")
    assert len({legend[phase] for phase in phases}) == 5, "each has a colour of its own"
    assert browser.complaints == []
