"""Measures the frames of a report's timeline while it is zoomed and panned over 100,000 events.

    nox -s bench -- profile_page

The events are those of a real capture of a small program. In each round, Chromium shows the page, receives turns of the
wheel and keys at 60 a second, and traces its own frames: an interval lies between two `DrawFrame` events. Processor
time is of the page's main thread, for each of these frames; it does not depend on the load of the machine, and the
intervals do. Writes `results/profile_page.md` and `.json`, and fails if the median interval is longer than that of 30
frames a second.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import CHROMIUM, Browser, open_browser
from profile_conversion import CAPTURE
from report import RESULTS, circumstances, five_numbers, spread, table, write

from stack_profile.report.page import page
from stack_profile.traces.trace import load_trace

EVENTS = 100_000
STEPS = 150  # of the program, which has some 1,000 events in a step
LIMIT_MS = 1000 / 30
INPUTS, INTERVAL_S = 120, 1 / 60
_LEAST_INTERVALS = 10  # a browser that is starved of processors draws few frames
FRAMES = ("devtools.timeline", "disabled-by-default-devtools.timeline.frame", "devtools.timeline.frame")
CANVAS = """(() => { const box = document.querySelector('.lanes canvas').getBoundingClientRect();
  return [box.left, box.top, box.width]; })()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2")
    if CHROMIUM is None:
        parser.error("needs a browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(_page(Path(folder)), encoding="utf-8")
        load = os.getloadavg()[0]
        with open_browser(Path(folder, "browser")) as browser:
            version = browser.call("Browser.getVersion")["product"]
            rounds = [_measured(browser, path) for _ in range(arguments.rounds)]
    record = {
        **circumstances(),
        "browser": version,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "events": EVENTS,
        "limit_ms": round(LIMIT_MS, 1),
        "figures": {name: five_numbers([each[name] for each in rounds]) for name in rounds[0]},
        "rounds": rounds,
    }
    write(arguments.results, "profile_page", record, _markdown(record))
    if record["figures"]["median interval, ms"][2] > LIMIT_MS:
        sys.exit(f"The median interval of frames is longer than {LIMIT_MS:.1f} ms.")


def _page(folder: Path) -> str:
    """Captures the program, and returns the page with exactly that number of events."""
    program = [sys.executable, "-c", CAPTURE, str(folder / "capture"), str(STEPS)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    trace = load_trace(done.stdout.split()[-1])
    recorded = sum(map(len, trace.devices))
    if recorded < EVENTS:
        sys.exit(f"The capture has only {recorded:,} operations: raise STEPS.")
    return page(trace, [], events=EVENTS)


def _measured(browser: Browser, path: Path) -> dict[str, float]:
    """Zooms in and out and pans, a third by the keyboard, and returns figures of the frames."""
    browser.open(path)
    left, top, width = browser.evaluate(CANVAS)
    browser.evaluate("document.querySelector('.lanes canvas').focus()")
    place = {"x": left + 0.6 * width, "y": top + 60}
    turns = [{"deltaX": across, "deltaY": down} for across, down in ((0, -60), (0, 60), (40, 0), (-40, 0))]
    with browser.trace(*FRAMES), browser.thread_time() as spent:
        due_s = time.perf_counter()
        for number in range(INPUTS):
            if number % 3 == 2:
                key = "wdas"[number // 3 % 4]
                browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
            else:
                browser.send("Input.dispatchMouseEvent", type="mouseWheel", **place, **turns[number % 4])
            due_s += INTERVAL_S
            time.sleep(max(due_s - time.perf_counter(), 0))
        browser.drawn()
    drawn_ms = sorted(event["ts"] / 1e3 for event in browser.traced if event["name"] == "DrawFrame")
    begun = sum(event["name"] == "BeginMainThreadFrame" for event in browser.traced)
    intervals = [after - before for before, after in itertools.pairwise(drawn_ms)]
    if len(intervals) < _LEAST_INTERVALS:
        sys.exit(f"The browser drew only {len(drawn_ms)} frames for {INPUTS} inputs; its trace is of no use.")
    return {
        "frames": len(drawn_ms),
        "median interval, ms": round(statistics.median(intervals), 2),
        "95th percentile, ms": round(statistics.quantiles(intervals, n=20, method="inclusive")[-1], 2),
        "main thread, processor ms per frame": round(1e3 * spent[0] / max(begun, 1), 2),
    }


def _markdown(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    rows: Sequence[Sequence[str]] = [(name, spread(numbers)) for name, numbers in record["figures"].items()]
    before, after = record["load"]
    return "\n".join(
        [
            "# Frames of the report's timeline",
            "",
            f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, load {before} to {after}; "
            f"{record['browser']}. {record['events']:,} events, {len(record['rounds'])} rounds of {INPUTS} turns of "
            "the wheel and keys at 60 a second. Each figure is the median of the rounds, with the least and the most.",
            "",
            *table(["figure", "median (range)"], rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
