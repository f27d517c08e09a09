"""The lines of `metrics.jsonl` and `history.jsonl`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["number_in", "records"]


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, none where there is no file; lines torn by a kill are left out."""
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
    """Returns a metric, or None where the record has none or what it has is no number."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
