"""Spans of requests, engine steps, rollouts and rewards, which `stack_core.runtime.spans` records."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import numpy as np

from stack_core.runtime.spans import SPAN_FIELDS, SPAN_PREFIX
from stack_profile.traces.xplane import MISSING, Space

__all__ = ["ServedRequest", "WorkSpan", "requests_of", "rollout_groups", "work_spans"]

_PICOSECONDS: Final = 1e12


@dataclass(frozen=True)
class WorkSpan:
    """A span of a process.

    Attributes:
      name: "queue", "engine_step", "stream", "rollout" or "reward".
      start_ps, end_ps: times since the base of the trace.
      fields: fields of the span.
    """

    name: str
    start_ps: int
    end_ps: int
    fields: dict[str, Any]


@dataclass
class ServedRequest:
    """A continuation of a request, as far as the trace has it.

    Attributes:
      request: id of the request.
      index: number of the continuation.
      queue: wait for its first step; None if it began before the trace.
      steps: its engine steps with the numbers of computed prompt tokens and of generated tokens.
      sent: times of its updates with their numbers of tokens.
      end: finish reason; "" if it did not finish in the trace.
    """

    request: str
    index: int
    queue: WorkSpan | None = None
    steps: list[tuple[WorkSpan, int, int]] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)
    end: str = ""

    @property
    def start_ps(self) -> int:
        """Arrival, or the first event in the trace."""
        starts = [span.start_ps for span, _, _ in self.steps] + [time for time, _ in self.sent]
        return self.queue.start_ps if self.queue else min(starts)

    @property
    def end_ps(self) -> int:
        """Last event in the trace."""
        ends = [span.end_ps for span, _, _ in self.steps] + [time for time, _ in self.sent]
        return max(ends, default=self.queue.end_ps if self.queue else 0)

    @property
    def generated_tokens(self) -> int:
        return sum(new for _, _, new in self.steps)

    @property
    def first_token_ps(self) -> int | None:
        """End of the step with the first token; None if the step is not in the trace."""
        return next((span.end_ps for span, _, new in self.steps if new), None) if self.queue else None

    @property
    def first_sent_ps(self) -> int | None:
        """Time of the first update with tokens; None if it is not in the trace."""
        return next((time for time, tokens in self.sent if tokens), None) if self.queue else None


def work_spans(space: Space, base_ns: int) -> list[WorkSpan]:
    """Returns the spans of a process in order of their ends; unreadable spans are skipped."""
    found: list[WorkSpan] = []
    for plane in (plane for plane in space.planes if plane.name == "/host:CPU"):
        for line in plane.lines:
            keys = line.events.stats[SPAN_FIELDS]
            rows = np.flatnonzero(keys != MISSING)
            ends = (line.events.start_ps(base_ns) + line.events.duration_ps)[rows].tolist()
            for row, end in zip(rows.tolist(), ends, strict=True):
                name = plane.event_names.get(int(line.events.metadata[row]), "")
                found += _span(name, end, plane.text(int(keys[row])))
    return sorted(found, key=lambda span: span.end_ps)


def _span(name: str, end_ps: int, text: str) -> Iterator[WorkSpan]:
    try:
        fields = {key: _unquoted(value) for key, value in json.loads(text).items()}
        duration_ps = round(fields.pop("duration_s") * _PICOSECONDS)
    except (ValueError, KeyError, TypeError, AttributeError):  # a mark of another program, or a damaged one
        return
    yield WorkSpan(name.removeprefix(SPAN_PREFIX), end_ps - duration_ps, end_ps, fields)


def _unquoted(value: Any) -> Any:
    if isinstance(value, str):
        return unquote(value)
    return [_unquoted(each) for each in value] if isinstance(value, list) else value


def requests_of(spans: Sequence[WorkSpan]) -> list[ServedRequest]:
    """Returns the requests of a process in order of their first spans; an id may occur again after its end."""
    found: list[ServedRequest] = []
    current: dict[tuple[str, int], ServedRequest] = {}

    def of(request: str, index: int) -> ServedRequest:
        key = (request, index)
        if key not in current:
            current[key] = ServedRequest(request, index)
            found.append(current[key])
        return current[key]

    for span in spans:
        if span.name == "queue":
            current.pop((span.fields["request"], span.fields["index"]), None)
            of(span.fields["request"], span.fields["index"]).queue = span
        elif span.name == "engine_step":
            for request, index, prompt, new in span.fields["rows"]:
                # A step that was launched ahead computes rows of continuations that have ended.
                if prompt or new:
                    of(request, index).steps.append((span, prompt, new))
        elif span.name == "stream":
            each = of(span.fields["request"], span.fields["index"])
            each.sent.append((span.end_ps, span.fields["tokens"]))
            each.end = span.fields["end"] or each.end
    return found


def rollout_groups(spans: Sequence[WorkSpan]) -> list[list[WorkSpan]]:
    """Returns the episodes of a process by group and task, in order of their starts."""
    found: dict[tuple[int, int], list[WorkSpan]] = {}
    for span in sorted((span for span in spans if span.name == "rollout"), key=lambda span: span.start_ps):
        found.setdefault((span.fields["group"], span.fields["task"]), []).append(span)
    return list(found.values())
