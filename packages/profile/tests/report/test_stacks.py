"""The page's Python stacks in a browser: sums by line and the flame view have the samples of the capture."""

import time

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.exports import write
from stack_profile.report.events import recorded_events
from stack_profile.report.page import page
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace


def wait_for_input():
    time.sleep(0.02)


def test_python_stacks_have_sums_by_line_and_a_flame_view(browser, tmp_path):
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jax.block_until_ready(step(jnp.ones((64, 64))))
    with stack_profile.capture(tmp_path / "out", stacks_hz=500.0) as captured:
        for _ in range(8):
            wait_for_input()
            x = jax.block_until_ready(step(x))
    trace = load_trace(captured.wait())
    write([page(trace, [])], tmp_path / "report.html")
    recorded = recorded_events(trace, short_paths(trace))
    sums = {}
    for lane in (lane for lane in recorded.lanes if lane.type == "stacks"):
        for kind, self_ps in zip(lane.kind.tolist(), lane.self_ps.tolist(), strict=True):
            line = recorded.kinds[kind].get("line", "(none)")
            sums[line] = sums.get(line, 0.0) + self_ps * 1e-12
    browser.open(tmp_path / "report.html", "#of=stacks&by=line")
    assert {row["line"]: row["self"] for row in browser.rows()} == pytest.approx(sums)
    mine = f"{short_paths(trace).file(__file__)}:{wait_for_input.__code__.co_firstlineno + 1}"
    assert sums[mine] == max(seconds for line, seconds in sums.items() if line != "(none)")
    browser.open(tmp_path / "report.html", "#of=stacks&tab=flame")
    boxes = browser.values(".flame button", "[each.dataset.name, Number(each.dataset.total)]")
    found = {name: total * 1e-12 for name, total in boxes}
    assert found[f"wait_for_input  {mine}"] == pytest.approx(sums[mine])
    assert found["MainThread"] <= found["all"] == pytest.approx(sum(sums.values()))
    assert browser.complaints == []
