"""Causes of slower steps at the level that explains them best: operation, line, layer, module, or host.

A slow line may be one operation or forty, in one layer or in all; an added layer has many lines. The chosen level has
the group that grew most; a finer level is preferred if its top group grew about as much. Operations that both programs
share are blamed only if edited operations do not explain the change: new work on the same cores slows shared operations
down too.
"""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stack_core.report.fields import number
from stack_profile.analyses.compile import compilations
from stack_profile.comparisons.comparison import TRIM, Comparison, DiffGrouping, Group, Place, grouped_difference
from stack_profile.comparisons.samples import Side
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace

__all__ = ["culprits"]

_LEVELS: Final[Sequence[DiffGrouping]] = ("op", "line", "layer", "module")
_AS_GOOD: Final = 0.85  # share of the largest growth at which a finer level is preferred
_STANDS_OUT: Final = 0.2  # minimum share of the step's change for a culprit
_MOST: Final = 0.5  # maximum share of the busy time before: a larger layer or module explains nothing
_LEAST_IDLE: Final = 0.01  # minimum share of the step; less idle time is noise
_SHOWN: Final = 3


@dataclass(frozen=True)
class _Grown:
    """A group of operations that takes longer than before.

    Attributes:
      own_s: seconds of change beyond the general drift.
      text: description for the user.
      name: name of the group at its level.
      line: line of its heaviest operation.
    """

    own_s: float
    text: str
    name: str = ""
    line: str = ""


def culprits(before: Sequence[Trace], after: Sequence[Trace]) -> Iterator[str]:
    """Yields the causes of slower steps, the largest first, or a statement that nothing stands out."""
    first, second = Side.of(before), Side.of(after)
    if first is None or second is None:
        return
    comparison = Comparison.of(first, second)
    change_s, busy_s = float(comparison.step.change[0]), float(comparison.busy.change[0])
    if change_s <= 0:
        return
    min_s = _STANDS_OUT * change_s
    grown = _at_the_best_level(comparison, comparison.edited, min_s)
    # Shared operations only if edits do not explain the change.
    grown = grown or _at_the_best_level(comparison, comparison.pairs, min_s)
    idle_s = change_s - busy_s
    if idle_s >= max(min_s, _LEAST_IDLE * float(comparison.step.before[0])):
        text, is_known = _idle(before, after, comparison, idle_s)
        grown.append(_Grown(idle_s if is_known else 0.0, text))  # unexplained idle time is listed last
    if grown:
        yield from (each.text for each in sorted(grown, key=lambda each: -each.own_s)[:_SHOWN])
    else:
        yield _nothing(comparison)


def _nothing(comparison: Comparison) -> str:
    peers = comparison.each.at(comparison.peers)
    if not len(peers.before):
        return "no operation stands out from the others"
    median = float(np.median(peers.change / peers.before))
    sign = "+" if median >= 0 else "-"
    return f"no operation stands out from the others, whose median changed by {sign}{number('_share', abs(median))}"


def _at_the_best_level(comparison: Comparison, pairs: tuple[Group, ...], min_s: float) -> list[_Grown]:
    """Returns the groups of `pairs` that grew by `min_s` or more, the largest first, at the best level."""
    levels = [_grown(comparison, pairs, by, min_s) for by in _LEVELS]
    op, *coarser = (found[0] if found else None for found in levels)
    most_s = max((each.own_s for each in coarser if each), default=0.0)
    line = coarser[0]
    # An operation is preferred if it has most of the growth of its line.
    if op and (most_s == 0 or (line and op.line == line.name and op.own_s >= _AS_GOOD * most_s)):
        return levels[0]
    best = (found for found in levels[1:] if found and found[0].own_s >= _AS_GOOD * most_s)
    return next(best, [])


def _grown(comparison: Comparison, pairs: tuple[Group, ...], by: DiffGrouping, min_s: float) -> list[_Grown]:
    groups = comparison.groups(by, pairs)
    if not groups:
        return []
    found = grouped_difference(*comparison.sides, groups, trim=TRIM)
    drift = _drift(comparison)
    grown = []
    for group, *times in zip(groups, found.before.tolist(), found.after.tolist(), strict=True):
        change_s = times[1] - times[0] * (1 + drift)
        place = Place.of(comparison, group)
        name = getattr(place, by)
        is_most = by in ("layer", "module") and times[0] >= _MOST * float(comparison.busy.before[0])
        if change_s >= min_s and name and not is_most:
            grown.append(_Grown(change_s, _describe(place, by, times), name, place.line))
    return sorted(grown, key=lambda each: -each.own_s)


def _drift(comparison: Comparison) -> float:
    """Returns the peers' median relative change; 0 with several captures on both sides or too few peers."""
    peers = comparison.each.at(comparison.peers)
    if comparison.each.of_captures or len(peers.before) < _LEAST_PEERS:
        return 0.0
    return float(np.median(peers.change / peers.before))


_LEAST_PEERS: Final = 3


def _describe(place: Place, by: DiffGrouping, times: Sequence[float]) -> str:
    line = place.line or "no line"
    if place.package_line and place.package_line != place.line:
        line = f"{line} in {place.package_line}"
    about = ", ".join(filter(None, (place.layer if by != "layer" else "", place.op)))
    # A layer has many lines, so the heaviest one is named as an example.
    if by in ("layer", "module"):
        line = f"{by} {getattr(place, by)}, mostly {line}"
    return f"{line} ({about}): {number('_s', times[0])} -> {number('_s', times[1])}"


def _idle(before: Sequence[Trace], after: Sequence[Trace], comparison: Comparison, idle_s: float) -> tuple[str, bool]:
    """Describes the host's activity in additional idle time; the flag is False if it is unknown."""
    counts = [sum(map(len, side.step_s)) for side in comparison.sides]
    compiled = [_compiling(traces, count) for traces, count in zip((before, after), counts, strict=True)]
    told = f"idle time of the devices: {number('_s', idle_s)} more a step"
    grown = {name: took - compiled[0].get(name, 0.0) for name, took in compiled[1].items()}
    if grown and sum(grown.values()) >= idle_s / 4:  # a quarter is enough, since tracing and lowering take time too
        name = max(grown, key=lambda each: grown[each])
        line = _line_of(after, name)
        return f"{line or 'no line'} (recompilation of {name}, {number('_s', grown[name])} a step): {told}", True
    host = [_host(traces, count) for traces, count in zip((before, after), counts, strict=True)]
    new = {name: took for name, took in host[1].items() if name not in host[0]}
    if new:
        name = max(new, key=lambda each: ("::" not in each, new[each]))  # prefer the program's events to the runtime's
        waits = ", waiting for the value of an array, such as one copied to the host" if _WAIT in name else ""
        return f"{told}; the host now spends {number('_s', new[name])} a step in {name}{waits}", True
    return f"{told}; `stack profile overview` shows the host's activity", False


_WAIT: Final = "::Await"  # the runtime's name, whichever JAX function waits for the value


def _compiling(traces: Sequence[Trace], steps: int) -> dict[str, float]:
    """Returns the seconds per step of compilations, by module."""
    took: dict[str, float] = {}
    for row in (row for trace in traces for row in compilations(trace).rows if row.compile_s):
        took[row.name] = took.get(row.name, 0.0) + (row.compile_s or 0.0) / steps
    return took


def _line_of(traces: Sequence[Trace], module: str) -> str:
    """Returns the user's line of a module's first instruction with a stack."""
    programs = (program for trace in traces for program in trace.programs if program.name == module)
    found = (each.source() for program in programs for each in program.instructions.values() if each.frames)
    return str(next(found, None) or "")


def _host(traces: Sequence[Trace], steps: int) -> dict[str, float]:
    """Returns the seconds per step of host events that occur at least every second step, by name."""
    took: dict[str, float] = {}
    counts: collections.Counter[str] = collections.Counter()
    for host in (trace.host_events for trace in traces):
        seconds = np.bincount(host.which, host.end_ps - host.start_ps, minlength=len(host.names)) * PICOSECOND
        for name, each_s, count in zip(
            host.names, seconds.tolist(), np.bincount(host.which, minlength=len(host.names)).tolist(), strict=True
        ):
            took[name] = took.get(name, 0.0) + each_s / steps
            counts[name] += count
    return {name: seconds for name, seconds in took.items() if 2 * counts[name] >= steps}
