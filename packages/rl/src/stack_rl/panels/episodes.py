"""The panel `episodes`: the policy's episodes in the last evaluation, with rewards and verdicts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.reports import Fragment
from stack_core.report.markup import Markup, element
from stack_rl.samples import SAMPLES_FILE

__all__ = ["episodes"]


def episodes(directory: Path, config: Mapping[str, Any]) -> Fragment | None:
    """Renders the episodes of the last evaluation as a table; returns None for runs without evaluations."""
    found = _records(directory / SAMPLES_FILE)
    if not found:
        return None
    step = max(each["step"] for each in found)
    # A resumed run repeats evaluations, so only the last record of each task counts.
    last = {each["task"]: each for each in found if each["step"] == step}
    columns = element("tr", *(element("th", name) for name in ("task", "episode", "reward", "verdict")))
    body = element("table", element("thead", columns), element("tbody", *map(_line, last.values())))
    note = element("p", f"Greedy episodes at step {step:,}; what the policy wrote is bold.", class_="help")
    return Fragment("episodes", element("div", note, body))


def _line(record: Mapping[str, Any]) -> Markup:
    pieces = [
        element("b", piece) if place % 2 else element("span", piece) for place, piece in enumerate(record["turns"])
    ]
    parts = (part for piece in pieces for part in (piece, " "))
    cells = (record["task"], element("code", *parts), f"{record['reward']:.3g}", record["verdict"] or "")
    return element("tr", *(element("td", cell) for cell in cells))


def _records(path: Path) -> list[dict[str, Any]]:
    """Reads the samples in a JSONL file; skips lines that a killed process left incomplete."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
