"""A page of ten minutes of a served model, with a million events, opens within five seconds of processor time."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stack_core.runtime.spans import SPAN_FIELDS, SPAN_PREFIX
from stack_profile.exports import write
from stack_profile.report.page import page
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space

STEPS, STEP_US = 12_000, 50_000  # ten minutes
KERNELS, CALLS = 40, 10  # events of the device and of the host's thread in a step
SLOTS, REQUEST_STEPS, STAGGER = 16, 64, 4  # requests at the same time, their steps, and the steps between two arrivals
OPEN_S = 5.0
PAGE_BYTES = 20_000_000
# Colours of the legend that the timeline has.
COLOURS = """(() => { const canvas = document.querySelector('.lanes canvas'); const found = new Set();
  const { data } = canvas.getContext('2d').getImageData(200, 0, canvas.width - 200, canvas.height);
  for (let i = 0; i < data.length; i += 4) found.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
  const legend = [...document.querySelectorAll('.legend .swatch')].map(each => getComputedStyle(each).backgroundColor);
  return legend.filter(each => found.has(each)); })()"""


@dataclass
class Line:
    """A line of a plane that takes a second for a million events, unlike `PlaneBuilder.line`."""

    build: Any
    plane: Any
    name: str
    parts: list[bytes] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, name, start_us, duration_us, about=b""):
        varint = self.build.varint
        key = self.plane.events.setdefault(name, len(self.plane.events) + 1)
        # Picoseconds as noisy as measured ones, which hardly compress.
        noise_ps = int(self.random.integers(1_000_000))
        times = b"\x10" + varint(start_us * 1_000_000 + noise_ps) + b"\x18" + varint(duration_us * 1_000_000 - noise_ps)
        event = b"\x08" + varint(key) + times + about
        self.parts += b"\x22", varint(len(event)), event

    def span(self, name, at_us, **fields):
        self.add(f"{SPAN_PREFIX}{name}", at_us, 1, self.about(**{SPAN_FIELDS: json.dumps(fields)}))

    def about(self, **stats):
        return b"".join(self.build.message((4, self.plane.stat(name, value))) for name, value in stats.items())

    def close(self):
        self.plane.lines.append(self.build.message((2, self.name), (3, 1_000)) + b"".join(self.parts))


@pytest.fixture
def served(build):
    """A capture of a server that decodes with 16 requests at a time."""
    device, host = build.plane("/device:GPU:0"), build.plane("/host:CPU")
    line = functools.partial(Line, build)
    stream, engine, thread, server = lines = (
        line(device, "Stream #1"),
        line(host, "engine"),
        line(host, "python"),
        line(host, "server"),
    )
    kernels = [
        (f"fusion.{each}", stream.about(hlo_op=f"fusion.{each}", hlo_module="jit_decode", program_id=1))
        for each in range(KERNELS)
    ]
    for step in range(STEPS):
        start, end, run = step * STEP_US, (step + 1) * STEP_US - 100, stream.about(run_id=step)
        for place, (name, about) in enumerate(kernels):
            stream.add(name, start + 500 + 1200 * place, 900 + 10 * (place % 7), about + run)
        for call in range(CALLS):
            thread.add(f"host work {call}" if call else "PjitFunction(decode)", start + 500 * call, 400)
        rows = []
        for slot in range(SLOTS):
            number, age = divmod(step + STAGGER * slot, REQUEST_STEPS)
            request = {"request": f"{slot}-{number}", "index": 0}
            rows.append([*request.values(), 0 if age else 100, 1])
            if not age:
                engine.span("queue", start, duration_s=0.01, **request, prompt_tokens=100, cached_tokens=0)
            last = "stop" if age == REQUEST_STEPS - 1 else None
            server.span("stream", end + 3 * slot, duration_s=0.0, **request, tokens=1, end=last)
        engine.span("engine_step", end - 1, duration_s=0.0499, rows=rows)
    for each in lines:
        each.close()
    return trace_of([read_space(build.space(device, host))])


@pytest.mark.slow
def test_a_million_events_of_ten_minutes_open_in_five_seconds_of_processor_time(browser, served, tmp_path):
    path = tmp_path / "page.html"
    write([page(served, [])], path)
    assert path.stat().st_size < PAGE_BYTES
    browser.open(path)  # the browser compiles the script
    with browser.thread_time() as spent:
        browser.open(path, "#by=op")
    assert spent[0] < OPEN_S
    arrivals = sum((step + STAGGER * slot) % REQUEST_STEPS == 0 for step in range(STEPS) for slot in range(SLOTS))
    recorded = STEPS * (1 + KERNELS + CALLS + SLOTS + 1) + arrivals  # runs of the program, ..., engine steps
    assert browser.evaluate("document.querySelector('#instrument [role=status]').textContent") == f"{recorded:,} events"
    # The lanes of engine steps and requests show the marks again: phases, updates, and waits for the first step.
    assert recorded + STEPS * (2 * SLOTS + 1) + arrivals > 1_000_000
    colours = browser.evaluate(COLOURS)
    assert len(colours) > 5, "the categories of operations, calls and phases are drawn"
    rows = {row["name"]: row["occurrences"] for row in browser.rows()}
    assert rows == {f"jit_decode: fusion.{each}": STEPS for each in range(KERNELS)}
