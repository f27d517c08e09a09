"""Links from rows of analyses to their events on the page's timeline, by the names of the rows' fields.

A row of a step (`device`, `step_number`), of a part of a window (`start_s`, `duration_s` and the fact `start_s`), or of
an operation or host event (`name`, `stage` or `event`, with `program` if the row has it) links to these events; any
other row with a `line` links to the events of the line. A third party's analysis links by the same fields.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from stack_profile.report.events import Recorded
from stack_profile.traces.short_paths import ShortPaths

__all__ = ["Links"]

_PICOSECOND: Final = 1e-12


class Links:
    """Addresses of events by the rows of analyses."""

    def __init__(self, recorded: Recorded, paths: ShortPaths) -> None:
        self._paths = paths
        self._programs = {kind["module"] for kind in recorded.kinds if kind["type"] == "operation"}
        self._operations = {
            f"{kind['module']}: {kind['name']}" for kind in recorded.kinds if kind["type"] == "operation"
        }
        self._names = {kind["name"] for kind in recorded.kinds if kind["type"] in ("operation", "host")}
        self._lines = {kind["line"] for kind in recorded.kinds if "line" in kind}
        self._steps = {
            (lane.group, recorded.kinds[k]["name"])
            for lane in recorded.lanes
            if lane.type == "steps"
            for k in lane.kind.tolist()
        }

    def address(self, row: object, totals: Mapping[str, Any]) -> str | None:
        """Returns the address of a row's events, without "#"; None for a row without events.

        Args:
          row: row of an analysis.
          totals: facts of its answer.
        """
        values = {name: getattr(row, name, None) for name in _FIELDS}
        step = (values["device"], f"step {values['step_number']}")
        if step in self._steps:
            return _address(device=step[0], step=str(values["step_number"]))
        start, duration = values["start_s"], values["duration_s"]
        if isinstance(start, float) and isinstance(duration, float) and isinstance(totals.get("start_s"), float):
            first = round((totals["start_s"] + start) / _PICOSECOND)
            return _address(s=f"{first}-{first + max(round(duration / _PICOSECOND), 1)}", device=totals.get("device"))
        return self._named(values) or self._of_line(values["line"])

    def _named(self, values: Mapping[str, Any]) -> str | None:
        for name in (
            name for name in (values["name"], values["stage"], values["event"]) if isinstance(name, str) and name
        ):
            program = values["program"] or values["module"]
            operation = f"{program}: {name}" if program else name
            if operation in self._operations:
                return _address(op=operation)
            if name in self._names:
                return _address(name=name)
            if name in self._programs:
                return _address(module=name)
            if self._paths.text(name) in self._lines:
                return self._of_line(name)
        return None

    def _of_line(self, line: object) -> str | None:
        short = self._paths.text(line) if isinstance(line, str) else ""
        return _address(line=short) if short in self._lines else None


_FIELDS: Final = (
    "device",
    "step_number",
    "start_s",
    "duration_s",
    "name",
    "stage",
    "event",
    "program",
    "module",
    "line",
)


def _address(**parts: str | None) -> str:
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items() if value)
