"""Lanes of the stack's own concurrent work: requests, engine steps, rollouts, rewards, and the trainer's steps."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from stack_profile.captures.processes import names_of
from stack_profile.report.lanes import AddKinds, Lane, host_group
from stack_profile.traces.intervals import tracks
from stack_profile.traces.trace import Trace
from stack_profile.traces.work_spans import ServedRequest, WorkSpan, requests_of, rollout_groups, work_spans
from stack_profile.traces.xplane import MISSING, Space

__all__ = ["work_lanes"]

# Name, category, start, end and row of an event.
_Event = tuple[str, str, int, int, int]


def work_lanes(trace: Trace, add: AddKinds) -> Iterator[Lane]:
    """Yields the lanes of each process that has such work.

    A request has two rows: its phases (queue, prefill, and each decoding step), and the deliveries of its updates.
    """
    for space, prefix in zip(trace.spaces, names_of(trace.spaces), strict=True):
        spans, group = work_spans(space, trace.base_ns), host_group(trace, prefix)
        if any(span.name == "rollout" for span in spans):
            yield from _lane(group, "trainer steps", _trainer_steps(space, trace.base_ns), add)
        yield from _lane(group, "rollouts", _rollouts(spans), add)
        yield from _lane(group, "rewards", _rows([_named(span) for span in spans if span.name == "reward"]), add)
        steps = [_engine_step(span) for span in spans if span.name == "engine_step"]
        yield from _lane(group, "engine steps", _rows(steps), add)
        yield from _lane(group, "requests", _requests(requests_of(spans)), add)


def _lane(group: str, name: str, events: Sequence[_Event], add: AddKinds) -> Iterator[Lane]:
    if not events:
        return
    ordered = sorted(events, key=lambda event: (event[2], event[4]))
    names = list(dict.fromkeys(event[:2] for event in ordered))
    first = add([{"type": "work", "name": name, "category": category} for name, category in names])
    places = {each: first + place for place, each in enumerate(names)}
    start, end, row = (np.array([event[column] for event in ordered], np.int64) for column in (2, 3, 4))
    kind = np.array([places[event[:2]] for event in ordered], np.int64)
    duration = end - start
    yield Lane(group, name, "work", int(row.max()) + 1, start, duration, duration.astype(float), kind, row)


def _rows(events: Sequence[tuple[str, str, int, int]]) -> list[_Event]:
    """Puts concurrent events on different rows."""
    if not events:
        return []
    ordered = sorted(events, key=lambda event: event[2])
    rows = tracks(*(np.array([event[column] for event in ordered], np.int64) for column in (2, 3)))
    return [(*event, row) for event, row in zip(ordered, rows.tolist(), strict=True)]


def _engine_step(span: WorkSpan) -> tuple[str, str, int, int]:
    rows = span.fields["rows"]
    prefill = sum(bool(prompt) for _, _, prompt, _ in rows)
    parts = [f"{count} {name}" for count, name in ((prefill, "prefill"), (len(rows) - prefill, "decode")) if count]
    return ", ".join(parts), "engine step", span.start_ps, span.end_ps


def _named(span: WorkSpan) -> tuple[str, str, int, int]:
    fields = span.fields
    if span.name == "reward":
        return f"{fields['reward']}: {fields['value']}", "reward", span.start_ps, span.end_ps
    name = f"group {fields['group']}, task {fields['task']}: {fields['tokens']} tokens, reward {fields['reward']:.3g}"
    return name, "rollout", span.start_ps, span.end_ps


def _rollouts(spans: Sequence[WorkSpan]) -> list[_Event]:
    """Returns the episodes, or their groups if there are more than `_MOST_ROWS` episodes at the same time."""
    groups = rollout_groups(spans)
    episodes = _rows([_named(span) for group in groups for span in group])
    if not episodes or max(row for *_, row in episodes) < _MOST_ROWS:
        return episodes
    return _rows([_group(group) for group in groups])


_MOST_ROWS: Final = 32


def _group(group: Sequence[WorkSpan]) -> tuple[str, str, int, int]:
    fields = group[0].fields
    reward = sum(span.fields["reward"] for span in group) / len(group)
    name = f"group {fields['group']}, task {fields['task']}: {len(group)} episodes, mean reward {reward:.3g}"
    return name, "rollout", min(span.start_ps for span in group), max(span.end_ps for span in group)


def _requests(found: Sequence[ServedRequest]) -> list[_Event]:
    events: list[_Event] = []
    ordered = sorted(found, key=lambda each: each.start_ps)
    if not ordered:
        return events
    rows = tracks(*(np.array([getattr(each, name) for each in ordered], np.int64) for name in ("start_ps", "end_ps")))
    for each, row in zip(ordered, rows.tolist(), strict=True):
        name = each.request + (f" ({each.index + 1})" if each.index else "")
        if each.queue is not None:
            events.append((f"{name} queue", "queue", each.queue.start_ps, each.queue.end_ps, 2 * row))
        last = each.queue.end_ps if each.queue else each.start_ps
        for span, prompt, _ in each.steps:
            phase = "prefill" if prompt else "decode"
            events.append((f"{name} {phase}", phase, max(last, span.start_ps), span.end_ps, 2 * row))
            last = span.end_ps
        ends = sorted(span.end_ps for span, _, new in each.steps if new)
        sent = each.start_ps
        for time, _ in each.sent:
            place = bisect.bisect_right(ends, time)
            begun = ends[place - 1] if place else time
            events.append((f"{name} stream", "stream", max(sent, begun), time, 2 * row + 1))
            sent = time
    return events


def _trainer_steps(space: Space, base_ns: int) -> list[_Event]:
    """Returns the annotated steps of the process."""
    events = []
    for plane in (plane for plane in space.planes if plane.name == "/host:CPU"):
        for line in plane.lines:
            numbers = line.events.stats["step_num"]
            starts, durations = line.events.start_ps(base_ns), line.events.duration_ps
            for row in np.flatnonzero(numbers != MISSING).tolist():
                start = int(starts[row])
                events.append((f"step {int(numbers[row])}", "trainer step", start, start + int(durations[row])))
    return _rows(events)
