"""Transfers between hosts or TPU slices: bytes, time, bandwidth, and the time that hides them.

A transfer lasts from the arrival of the last host until the last host has the result. S is the number of bytes that a
host sends to others in one execution in the algorithm that sends the least, for H hosts, each with d of the n devices
of a group:

    all-reduce                   S = 2 (H - 1) / H * array
    all-gather, reduce-scatter   S = (H - 1) / H * array
    all-to-all                   S = d (n - d) / n * array
    collective-permute           S = array for each pair with its source on the host and its target on another one
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.report.plots import bars
from stack_profile.analyses.hosts import missing_collectives
from stack_profile.analyses.ops import grouping
from stack_profile.answer import Answer
from stack_profile.traces.meetings import Formation, Meetings
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace

__all__ = ["TransferRow", "transfers"]


@dataclass(frozen=True)
class TransferRow:
    """A collective between hosts. Times are means of the hosts, except `time_s`, which is the same for all.

    Attributes:
      name: collective and program.
      kind: "all-reduce", "all-gather", "collective-permute", ...
      hosts: hosts that send and receive, or pairs "source -> target".
      slices: TPU slices of the hosts; "" if the capture did not record them.
      axis: mesh axes that the collective spans.
      line: Python line of the collective.
      occurrences: number of executions.
      sent_bytes: bytes that a host sends to other hosts in all executions; None if unknown.
      time_s: time from the last arrival to the end of all executions.
      rate_bytes_s: `sent_bytes` per second of `time_s`.
      wait_s: time in which a host waited for the last host.
      slack_s: time between start and end in which the host's devices ran other operations.
      stall_s: time between start and end in which they ran nothing else, including `wait_s`.
      required_bytes_s: bandwidth that would fit the transfer in `slack_s`; None without slack.
    """

    name: str
    kind: str
    hosts: str
    slices: str
    axis: str
    line: str
    occurrences: int
    sent_bytes: float | None
    time_s: float
    rate_bytes_s: float | None
    wait_s: float
    slack_s: float
    stall_s: float
    required_bytes_s: float | None


def transfers(trace: Trace) -> Answer[TransferRow]:
    """Show what hosts or slices send each other, at which bandwidth, and how much of it computation hides."""
    formation = trace.formation
    if not formation.meetings:
        return Answer("transfers", {}, TransferRow, (), (missing_collectives(formation), *trace.problems))
    slices = [about.get("slice") for about in trace.abouts]
    rows = sorted((_row(each, formation, slices) for each in formation.meetings), key=lambda row: -row.stall_s)
    return Answer(
        name="transfers",
        facts=_totals(rows, formation),
        row_type=TransferRow,
        rows=tuple(rows),
        notes=(*_notes(rows), *trace.problems),
        plots=(bars("Transfers between hosts, hidden and not", rows, "slack_s", "stall_s"),),
    )


def _row(each: Meetings, formation: Formation, slices: Sequence[Any]) -> TransferRow:
    count = each.start_ps.shape[1]
    arrived, ended = each.start_ps.max(axis=0), each.end_ps.max(axis=0)
    time_s = int((ended - arrived).clip(0).sum()) * PICOSECOND
    duration_ps = (each.end_ps - each.start_ps).mean(axis=0).sum()
    stall_s = float(each.exposed_ps.mean(axis=0).sum()) * PICOSECOND
    slack_s = max(float(duration_ps) * PICOSECOND - stall_s, 0.0)
    sent = None if each.sent_bytes is None else each.sent_bytes * count
    known = [slices[host] for host in each.hosts if host < len(slices) and slices[host] is not None]
    return TransferRow(
        name=f"{each.operation.module}: {each.operation.name}",
        kind=each.kind.name,
        hosts=_hosts(each, formation.names),
        slices=", ".join(map(str, sorted(set(known)))),
        axis=each.kind.axis,
        line=grouping("line")(each.operation),
        occurrences=count,
        sent_bytes=sent,
        time_s=time_s,
        rate_bytes_s=sent / time_s if sent is not None and time_s else None,
        wait_s=float((arrived - each.start_ps).mean(axis=0).sum()) * PICOSECOND if each.is_mutual else 0.0,
        slack_s=slack_s,
        stall_s=stall_s,
        required_bytes_s=sent / slack_s if sent is not None and slack_s > 0 else None,
    )


def _hosts(each: Meetings, names: Sequence[str]) -> str:
    if each.routes:
        return ", ".join(f"{names[source]} -> {names[target]}" for source, target in each.routes)
    return ", ".join(names[host] for host in each.hosts)


def _totals(rows: Sequence[TransferRow], formation: Formation) -> dict[str, Any]:
    sent = [row.sent_bytes for row in rows if row.sent_bytes is not None]
    time_s = sum(row.time_s for row in rows)
    everything = sum(sent) if len(sent) == len(rows) else None
    return {
        "hosts": len(formation.names),
        "occurrences": sum(row.occurrences for row in rows),
        "sent_bytes": everything,
        "time_s": time_s,
        "rate_bytes_s": everything / time_s if everything is not None and time_s else None,
        "wait_s": sum(row.wait_s for row in rows),
        "slack_s": sum(row.slack_s for row in rows),
        "stall_s": sum(row.stall_s for row in rows),
    }


def _notes(rows: Sequence[TransferRow]) -> Iterator[str]:
    yield (
        "Bytes are sent by one host to others, times are means over hosts. Slack is the time in which other operations "
        "hide a collective; stall is the rest, including the wait for the last host."
    )
    if not any(row.slack_s > 0.01 * row.stall_s for row in rows):
        yield "No other operation runs during these collectives, so nothing hides them."
