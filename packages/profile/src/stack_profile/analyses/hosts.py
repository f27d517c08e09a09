"""Hosts of a run: their clocks, their delays at collectives, and the causes of the delays.

A collective begins when its last member arrives. The delay of that host is the time since the last but one arrival, by
which the collective would begin earlier if the host kept up. Arrivals that are closer than the clocks' error have no
last host. Before an arrival, from the first end of the previous collective on, the time of each host has a cause:

    previous collective  it ends later on this host than on the first one
    device work          a device of the host ran operations
    garbage collection, compilation, input, host code
                         a device was idle while the host did this; "host code" is everything else

The cause of a delay is the activity whose time before these collectives exceeds that of other hosts the most.
"""

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from stack_core.report.fields import number
from stack_core.report.plots import bars
from stack_profile.analyses.compile import compilation_events
from stack_profile.analyses.ops import grouping
from stack_profile.answer import Answer
from stack_profile.captures.processes import names_of
from stack_profile.traces.input_stages import stage_events
from stack_profile.traces.intervals import difference, gaps, intersection, union
from stack_profile.traces.meetings import Formation, HostClock, Meetings
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace, host_events_of

__all__ = ["CauseRow", "HostRow", "HostsGrouping", "arrivals_of", "hosts", "missing_collectives"]

HostsGrouping = Literal["host", "cause"]


@dataclass(frozen=True)
class HostRow:
    """A host, or a process if several run on a host.

    Attributes:
      name: name of the host.
      clock: "corrected", "kept" if the offset is within its error, or "unknown" without common collectives.
      offset_s: time on its clock minus time on the first host's, before the correction.
      error_s: half of the interval that contains the offset.
      drift_ppm: growth of the offset in parts per million; None if too small to measure.
      collectives: number of collectives with other hosts.
      last: number of collectives at which it arrived last.
      last_collectives_share: `last` as a share of `collectives`.
      delay_s: time by which these collectives would begin earlier if it kept up with the last but one host.
      wait_s: time for which it waited in collectives.
      cause: cause of most of the delay; "" without a delay.
      excess_s: time of the cause before the delayed collectives, in excess of its time on other hosts.
      line: Python line of the cause: of device work, or the most frequent one of the host's samples.
    """

    name: str
    clock: str
    offset_s: float | None
    error_s: float | None
    drift_ppm: float | None
    collectives: int
    last: int
    last_collectives_share: float | None
    delay_s: float
    wait_s: float
    cause: str
    excess_s: float | None
    line: str


@dataclass(frozen=True)
class CauseRow:
    """A cause of a host's delays.

    Attributes:
      name: name of the host.
      cause: "previous collective", "device work", "garbage collection", "compilation", "input" or "host code".
      own_s: time of the cause on the host, before the collectives that it delayed.
      others_s: mean of the same time on other hosts.
      excess_s: `own_s - others_s`.
      line: see `HostRow`.
      samples: number of the host's samples in this time.
    """

    name: str
    cause: str
    own_s: float
    others_s: float
    excess_s: float
    line: str
    samples: int


def hosts(trace: Trace, *, by: HostsGrouping = "host") -> Answer[Any]:
    """Show the clocks of the hosts of a run, which host delays the others, and why.

    Args:
      by: one row for each host, or for each cause of a host's delays.
    """
    formation = trace.formation
    arrivals = arrivals_of(formation, trace.clocks)
    row_type = HostRow if by == "host" else CauseRow
    if not arrivals:
        return Answer(f"hosts by {by}", {}, row_type, (), (missing_collectives(formation), *trace.problems))
    causes = tuple(_causes(trace, formation, arrivals))
    rows = [_row(place, clock, arrivals, causes) for place, clock in enumerate(trace.clocks)]
    rows.sort(key=lambda row: -row.delay_s)
    plot = bars("Delay of the others, by host", rows, "delay_s")
    shown = tuple(rows) if by == "host" else causes
    facts = _totals(rows, arrivals)
    notes = (*_notes(trace, rows, causes, facts["elapsed_s"]), *trace.problems)
    return Answer(f"hosts by {by}", facts, row_type, shown, notes, (plot,) if plot.labels else ())


@dataclass(frozen=True)
class Arrivals:
    """Executions of one mutual collective, with the host that arrives last.

    Attributes:
      meetings: the collective.
      last: row of the last host in `meetings.hosts`, -1 if the clocks' error hides it.
      late_ps: time from the last but one arrival to the last.
      wait_ps: waiting time of each host, int64[hosts, executions].
    """

    meetings: Meetings
    last: np.ndarray
    late_ps: np.ndarray
    wait_ps: np.ndarray


def arrivals_of(formation: Formation, clocks: Sequence[HostClock]) -> list[Arrivals]:
    """Returns the arrivals at all collectives that need every member."""
    found = []
    for each in (each for each in formation.meetings if each.is_mutual):
        ordered = np.sort(each.start_ps, axis=0)
        late_ps = ordered[-1] - ordered[-2]
        error_ps = max((clocks[host].error_s or 0.0) for host in each.hosts) / PICOSECOND
        last = np.where(late_ps > error_ps, np.argmax(each.start_ps, axis=0), -1)
        wait_ps = (ordered[-1] - each.start_ps).clip(0, (each.end_ps - each.start_ps).clip(0))
        found.append(Arrivals(each, last, late_ps, wait_ps))
    return found


def missing_collectives(formation: Formation) -> str:
    """Returns the note of an answer about a trace without collectives between processes."""
    if len(formation.names) < 2:
        return "No data: the trace is of one process. Captures of several processes with one name form one trace."
    return "No data: the trace has no collective in which several of its processes took part, or not their programs."


@dataclass(frozen=True)
class _Activity:
    """What a host did, as disjoint intervals in order of time.

    Attributes:
      idle: times in which a device of the host ran nothing.
      known: causes of idle time by name, the first one before the next.
    """

    idle: np.ndarray
    known: Mapping[str, np.ndarray]

    def split(self, tails: np.ndarray, windows: np.ndarray) -> dict[str, np.ndarray]:
        """Divides the times before collectives among the causes, see `_windows`."""
        rest = intersection(windows, self.idle)
        found = {_TAIL: difference(tails, windows), _WORK: difference(windows, rest)}
        for cause, intervals in self.known.items():
            found[cause] = intersection(rest, intervals)
            rest = difference(rest, intervals)
        return {**found, _HOST: rest}


_TAIL: Final = "previous collective"
_WORK: Final = "device work"
_HOST: Final = "host code"


def _activities(trace: Trace) -> list[_Activity]:
    found = []
    for place, prefix in enumerate(names_of(trace.spaces)):
        devices, space, stacks = trace.devices_of(prefix), trace.spaces[place], trace.host_stacks[place]
        first = min((int(ops.start_ps.min()) for ops in devices), default=0)
        last = max((int(ops.end_ps.max()) for ops in devices), default=0)
        idle = np.concatenate([np.zeros((0, 2), np.int64), *(gaps(ops.covered, first, last) for ops in devices)])
        stages = stage_events(space, trace.base_ns)
        calling = stages.thread == (-1 if stages.calling is None else stages.calling)
        compiled = [(start, end) for _, start, end in compilation_events(host_events_of([space], trace.base_ns))]
        pauses = (stacks.pauses.start_ps, stacks.pauses.end_ps) if stacks else (np.zeros(0, np.int64),) * 2
        known = {
            "garbage collection": union(*pauses),
            "compilation": union(*np.array(compiled, np.int64).reshape(-1, 2).T),
            "input": union(stages.start_ps[calling], stages.end_ps[calling]),
        }
        found.append(_Activity(union(*idle.T), known))
    return found


def _causes(trace: Trace, formation: Formation, arrivals: Sequence[Arrivals]) -> Iterator[CauseRow]:
    """Yields the causes of the delays of each host, by host and the largest first."""
    activities = _activities(trace)
    reached = [_ends(arrivals, host) for host in range(len(formation.names))]
    for host, name in enumerate(formation.names):
        own = _windows(arrivals, host, host, reached)
        if not len(own[1]):
            continue
        members = {each for part in arrivals if host in part.meetings.hosts for each in part.meetings.hosts} - {host}
        others = [(each, _windows(arrivals, host, each, reached)) for each in sorted(members)]
        split = {each: activities[each].split(*windows) for each, windows in ((host, own), *others)}
        rows = []
        for cause, intervals in split[host].items():
            mean_s = float(np.mean([_size_s(split[each][cause]) for each, _ in others]))
            line, samples = _sampled(trace, formation.names[host], intervals)
            if cause == _WORK:
                line = _slower_line(trace, host, {each: split[each][cause] for each in (host, *members)})
            own_s = _size_s(intervals)
            if own_s or mean_s:
                rows.append(CauseRow(name, cause, own_s, mean_s, own_s - mean_s, line, samples))
        yield from sorted(rows, key=lambda row: -row.excess_s)


def _size_s(intervals: np.ndarray) -> float:
    return int(np.sum(intervals[:, 1] - intervals[:, 0])) * PICOSECOND


def _ends(arrivals: Sequence[Arrivals], host: int) -> np.ndarray:
    """Returns the ends of all collectives on a host, in order of time."""
    found = [each.meetings.end_ps[each.meetings.hosts.index(host)] for each in arrivals if host in each.meetings.hosts]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def _windows(
    arrivals: Sequence[Arrivals], late: int, host: int, ends: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times of `host` before the collectives that `late` delayed.

    The first times are from the first end of the previous collective on any host until its end on this host, the second
    ones from then until this host arrives.
    """
    tails, windows = [np.zeros((2, 0), np.int64)], [np.zeros((2, 0), np.int64)]
    for each in arrivals:
        members = each.meetings.hosts
        if late not in members or host not in members:
            continue
        starts = each.meetings.start_ps[:, each.last == members.index(late)]
        places = [
            np.searchsorted(ends[member], start, "right") - 1 for member, start in zip(members, starts, strict=True)
        ]
        # Before the first collective of the capture, the time of the previous one is unknown.
        known = np.flatnonzero(np.min(places, axis=0) >= 0)
        previous = np.stack([ends[member][place[known]] for member, place in zip(members, places, strict=True)])
        row = members.index(host)
        tails.append(np.stack([previous.min(axis=0), previous[row]]))
        windows.append(np.stack([previous[row], starts[row, known]]))
    return union(*np.concatenate(tails, axis=1)), union(*np.concatenate(windows, axis=1))


def _sampled(trace: Trace, name: str, intervals: np.ndarray) -> tuple[str, int]:
    """Returns the most frequent line of the thread that calls JAX, and the number of its samples."""
    lines: collections.Counter[str] = collections.Counter()
    for each in trace.calling_samples:
        if each.prefix == f"{name}:" and len(intervals):
            lines.update(each.lines(intervals))
    return next(iter(lines.most_common(1)), ("", 0))[0], lines.total()


def _slower_line(trace: Trace, host: int, windows: Mapping[int, np.ndarray]) -> str:
    """Returns the line whose operations exceed their time on other hosts the most."""
    line = grouping("line")
    prefixes = names_of(trace.spaces)
    excess: collections.Counter[str] = collections.Counter()
    for each, intervals in windows.items():
        weight = 1.0 if each == host else -1.0 / (len(windows) - 1)
        for ops in trace.devices_of(prefixes[each]):
            place = np.searchsorted(intervals[:, 0], ops.start_ps, "right") - 1
            inside = (place >= 0) & (ops.start_ps < intervals[place.clip(0), 1]) if len(intervals) else place > len(ops)
            sums = np.bincount(ops.which[inside], weights=ops.self_ps[inside], minlength=len(ops.operations))
            for operation, self_ps in zip(ops.operations, sums.tolist(), strict=True):
                excess[line(operation)] += weight * self_ps
    found, most = next(iter(excess.most_common(1)), ("", 0.0))
    return found if most > 0 else ""


def _row(place: int, clock: HostClock, arrivals: Sequence[Arrivals], causes: Sequence[CauseRow]) -> HostRow:
    own = [(each, each.meetings.hosts.index(place)) for each in arrivals if place in each.meetings.hosts]
    count = sum(len(each.last) for each, _ in own)
    last = sum(int(np.sum(each.last == row)) for each, row in own)
    delay_ps = sum(int(each.late_ps[each.last == row].sum()) for each, row in own)
    cause = next((row for row in causes if row.name == clock.name and row.excess_s > 0), None)
    return HostRow(
        name=clock.name,
        clock="unknown" if clock.offset_s is None else "corrected" if clock.is_moved else "kept",
        offset_s=clock.offset_s,
        error_s=clock.error_s,
        drift_ppm=1e6 * clock.drift_s or None,
        collectives=count,
        last=last,
        last_collectives_share=last / count if count else None,
        delay_s=delay_ps * PICOSECOND,
        wait_s=sum(int(each.wait_ps[row].sum()) for each, row in own) * PICOSECOND,
        cause=cause.cause if cause else "",
        excess_s=cause.excess_s if cause else None,
        line=cause.line if cause else "",
    )


def _totals(rows: Sequence[HostRow], arrivals: Sequence[Arrivals]) -> dict[str, Any]:
    first = min(int(each.meetings.start_ps.min()) for each in arrivals)
    last = max(int(each.meetings.end_ps.max()) for each in arrivals)
    elapsed_s, delay_s = (last - first) * PICOSECOND, sum(row.delay_s for row in rows)
    return {
        "hosts": len(rows),
        "collectives": sum(len(each.last) for each in arrivals),
        "elapsed_s": elapsed_s,
        "delay_s": delay_s,
        "delay_elapsed_share": delay_s / elapsed_s if elapsed_s else None,
        "wait_s": sum(row.wait_s for row in rows),
        "straggler": next((row.name for row in rows if row.delay_s > 0), None),
    }


_FEW: Final = 0.02  # share of the time below which delays need no attention


def _notes(trace: Trace, rows: Sequence[HostRow], causes: Sequence[CauseRow], elapsed_s: float) -> Iterator[str]:
    seconds = functools.partial(number, "_s")
    for row in (row for row in rows if row.cause and row.delay_s > _FEW * elapsed_s):
        cause = next(each for each in causes if (each.name, each.cause) == (row.name, row.cause))
        yield (
            f"{row.name} arrives last at {row.last:,} of {row.collectives:,} collectives, which delays them by "
            f"{seconds(row.delay_s)}. Before these, it spends {seconds(cause.own_s)} on {row.cause}, "
            f"and the other hosts {seconds(cause.others_s)}{f', mostly at {row.line}' if row.line else ''}."
        )
    for row in (row for row in rows if row.clock == "corrected"):
        assert row.offset_s is not None and row.error_s is not None, "a corrected clock has an offset"
        ahead = "ahead of" if row.offset_s > 0 else "behind"
        yield (
            f"The clock of {row.name} is {seconds(abs(row.offset_s))} {ahead} that of {trace.clocks[0].name}, with an "
            f"error of {seconds(row.error_s)}; times are corrected."
        )
    unknown = [row.name for row in rows if row.clock == "unknown"]
    if unknown:
        names = ", ".join(unknown)
        yield f"Without a collective with the first host, a clock is unknown, and its times are as recorded: {names}."
    if any(clock.is_regular for clock in trace.clocks):
        yield "Runs are so regular or few that offsets may be wrong by whole runs; the smallest offset is used."
    if not trace.calling_samples:
        yield "The trace has no sampled Python stacks, which would name the lines of the hosts."
