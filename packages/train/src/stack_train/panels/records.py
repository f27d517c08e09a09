"""Reading of JSON lines files, such as `metrics.jsonl` and `history.jsonl`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["number_in", "records"]


def records(path: Path) -> list[dict[str, Any]]:
    """Reads the objects of a JSON lines file, empty if it does not exist; skips lines truncated by a kill."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        return list(_objects(lines))


def _objects(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def number_in(record: Mapping[str, Any], name: str) -> float | None:
    """Returns a metric of a record; None if it is missing or not a number."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
