"""Collectives between devices: bytes sent, time, waiting time, and exposed time.

A collective lasts from its start to its end, an asynchronous one from the beginning of its start operation to the end
of its done operation. Exposed time is the time in which a device runs collectives and nothing else; the rest is hidden
by other operations. Both times include waiting for the slowest device. With S the bytes that a device sends in the
algorithm that sends the least (`stack_core.programs.hlo_costs`),

    rate = S / (time - wait)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stack_core.report.plots import bars
from stack_profile.analyses.ops import chosen_devices, grouping
from stack_profile.answer import Answer
from stack_profile.traces.collectives import Axes, Collectives, Wait, collectives_of, waits_of
from stack_profile.traces.intervals import union
from stack_profile.traces.operations import PICOSECOND, Operation
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.chips import Chip

__all__ = ["CommunicationGrouping", "CommunicationRow", "communication", "link_bytes_s"]

CommunicationGrouping = Literal["op", "kind", "axis", "line", "layer"]


@dataclass(frozen=True)
class CommunicationRow:
    """Collectives of one group, summed over devices.

    Attributes:
      name: name of the group.
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", ...
      axis: mesh axes of the collective; without a mesh, its number of devices and their stride.
      line: Python line of the collectives; "" for several or unknown lines.
      occurrences: number of executions.
      array_bytes, sent_bytes: array bytes and bytes sent over the network, per device over all executions; None if the
        program is not known.
      time_s: time from start to end; overlapping collectives each count in full.
      wait_s: part of `time_s` spent waiting for the last device; None unless several devices of the trace ran the
        collective.
      exposed_s: part of `time_s` in which the device runs nothing else.
      hidden_s: `time_s - exposed_s`.
      exposed_busy_share: `exposed_s` as a share of `busy_s`, the time in which any operation ran.
      rate_bytes_s: bytes sent per second and device, without waiting time; None if the bytes are unknown.
      link_share: `rate_bytes_s` as a share of the chip's bandwidth over all links; None if the bandwidth is unknown.
    """

    name: str
    kind: str
    axis: str
    line: str
    occurrences: int
    array_bytes: float | None
    sent_bytes: float | None
    time_s: float
    wait_s: float | None
    exposed_s: float
    hidden_s: float
    exposed_busy_share: float | None
    rate_bytes_s: float | None
    link_share: float | None


def communication(
    trace: Trace,
    *,
    by: CommunicationGrouping = "op",
    mesh: str | None = None,
    chip: str | None = None,
    within: Path | None = None,
    device: str | None = None,
) -> Answer[CommunicationRow]:
    """Show what devices send each other, how long it takes, and how much of it nothing hides.

    Args:
      by: grouping of the collectives: individually, or by kind, mesh axis, Python line or layer.
      mesh: axes of the mesh in order, such as fsdp=4,tensor=2, if the trace does not name them.
      chip: name of a chip that `stack chips` lists, by default the trace's own.
      within: use the innermost line of a file under this directory, such as your own code's.
      device: one device instead of all of them together.

    Raises:
      UnknownName: the chip or the device is unknown.
      ProfileError: `mesh` is malformed, or its size is not the number of devices.
    """
    devices = chosen_devices(trace, device)
    axes = Axes.of(trace.about, len(trace.devices), mesh)
    # All devices are included, because waiting shows only in comparison.
    found = collectives_of(trace.devices, axes)
    waits = waits_of(found)
    chosen = [(each, waits[ops.device].get(each.identity)) for ops in devices for each in found[ops.device]]
    groups: dict[str, list[tuple[Collectives, Wait | None]]] = {}
    line = grouping("line", str(within.resolve()) if within else "")
    key = _key(by, line)
    for each, wait in chosen:
        groups.setdefault(key(each), []).append((each, wait))
    busy_s = sum((each.busy_s for each in devices), 0.0)
    links = link_bytes_s(trace, chip)
    rows = [_row(name, members, line, len(devices), busy_s, links) for name, members in groups.items()]
    # In the total, collectives that overlap count once.
    time_s = sum((_covered_s(found[each.device]) for each in devices), 0.0)
    # By exposed time first: hidden time does not lengthen a step.
    shown = tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.time_s, row.name)))
    return Answer(
        name=f"communication by {by}",
        facts=_totals(rows, len(devices), busy_s, time_s, links),
        row_type=CommunicationRow,
        rows=shown,
        notes=(*_notes(trace, [each for each, _ in chosen], axes, links), *trace.problems),
        plots=(bars("Time, exposed and hidden", shown, "exposed_s", "hidden_s"),) if rows else (),
    )


def _key(by: CommunicationGrouping, line: Callable[[Operation], str]) -> Callable[[Collectives], str]:
    if by == "kind":
        return lambda each: each.kind.name
    if by == "axis":
        return lambda each: each.kind.axis
    group = line if by == "line" else grouping(by)
    return lambda each: group(each.operation)


def link_bytes_s(trace: Trace, name: str | None) -> float | None:
    """Returns the bandwidth of a chip's links, or None for CPUs and unknown chips."""
    from stack_core.abi.plugins import registries
    from stack_core.chips.devices import row_name

    if name is None and (kind := trace.about.get("device_kind")) is not None:
        name = row_name(str(kind))
    chip: Chip | Callable[[], Chip] | None = None if name is None else registries.chips[name]
    # A callable measures this machine's CPU, which lacks links.
    return None if chip is None or callable(chip) else chip.link_bandwidth_bytes_s


def _row(
    name: str,
    members: Sequence[tuple[Collectives, Wait | None]],
    line: Callable[[Operation], str],
    devices: int,
    busy_s: float,
    links: float | None,
) -> CommunicationRow:
    waits = [wait for _, wait in members if wait is not None]
    known = [each for each, _ in members if each.kind.sent_bytes is not None]
    whole = len(known) == len(members)
    time_s = sum(int(each.duration_ps.sum()) for each, _ in members) * PICOSECOND
    exposed_s = sum(float(each.exposed_ps.sum()) for each, _ in members) * PICOSECOND
    rate = _rate(members)
    lines = {line(each.operation) for each, _ in members}
    return CommunicationRow(
        name=name,
        kind=", ".join(dict.fromkeys(each.kind.name for each, _ in members)),
        axis=" and ".join(dict.fromkeys(each.kind.axis for each, _ in members if each.kind.axis)),
        line=lines.pop() if len(lines) == 1 else "",
        occurrences=sum(len(each.start_ps) for each, _ in members),
        # Bytes per device, to compare with bandwidths, although times are sums over devices.
        array_bytes=sum((each.kind.array_bytes or 0) * len(each.run) for each in known) / devices if whole else None,
        sent_bytes=sum((each.kind.sent_bytes or 0) * len(each.run) for each in known) / devices if whole else None,
        time_s=time_s,
        # None instead of 0: a single device does not show how long it waited.
        wait_s=sum((wait.wait_s for wait in waits), 0.0) if waits else None,
        exposed_s=exposed_s,
        # Shares are floats, and their rounding could make the difference negative.
        hidden_s=max(time_s - exposed_s, 0.0),
        exposed_busy_share=exposed_s / busy_s if busy_s else None,
        rate_bytes_s=rate,
        link_share=rate / links if rate is not None and links else None,
    )


def _rate(members: Sequence[tuple[Collectives, Wait | None]]) -> float | None:
    """Computes bytes per second and device, over the executions with a known wait if there are any."""
    sent, talking_s = 0.0, 0.0
    for each, wait in members:
        if each.kind.sent_bytes is None:
            return None
        # Only executions that all devices have in common have a known wait.
        sent += each.kind.sent_bytes * (wait.count if wait else len(each.run))
        # Waiting for the last device is not a transfer.
        talking_s += wait.time_s - wait.wait_s if wait else int(each.duration_ps.sum()) * PICOSECOND
    return sent / talking_s if talking_s > 0 else None


def _covered_s(found: Sequence[Collectives]) -> float:
    """Computes the time in which any collective of a device ran."""
    if not found:
        return 0.0
    covered = union(np.concatenate([each.start_ps for each in found]), np.concatenate([each.end_ps for each in found]))
    return int(np.sum(covered[:, 1] - covered[:, 0])) * PICOSECOND


def _totals(
    rows: Sequence[CommunicationRow], devices: int, busy_s: float, time_s: float, links: float | None
) -> dict[str, Any]:
    if not devices:
        return {"devices": 0}
    exposed_s = sum((row.exposed_s for row in rows), 0.0)
    sent = [row.sent_bytes for row in rows if row.sent_bytes is not None]
    waits = [row.wait_s for row in rows if row.wait_s is not None]
    return {
        "devices": devices,
        "busy_s": busy_s,
        "communication_s": time_s,
        "exposed_s": exposed_s,
        # Without collectives a waiting time of 0 is a fact.
        "wait_s": sum(waits, 0.0) if waits or not rows else None,
        "communication_busy_share": time_s / busy_s if busy_s else None,
        "exposed_busy_share": exposed_s / busy_s if busy_s else None,
        "exposed_communication_share": exposed_s / time_s if time_s else None,
        "occurrences": sum(row.occurrences for row in rows),
        # A sum without some of the rows would look complete.
        "sent_bytes": sum(sent, 0.0) if len(sent) == len(rows) else None,
        "link_bytes_s": links,
    }


def _notes(trace: Trace, found: Sequence[Collectives], axes: Axes, links: float | None) -> Iterator[str]:
    if not trace.devices:
        yield "No data: the trace has no operations of any device."
        return
    if not found:
        yield "No collective ran: devices sent each other nothing (zero, not unknown)."
        return
    yield "Times are sums over the devices, bytes are per device; in exposed time, a device runs nothing else."
    if len(trace.devices) == 1:
        yield "The trace has one device: its waits for other devices are unknown, and its rate includes them."
    if any(each.kind.sent_bytes is None for each in found):
        yield "If the trace lacks a program, or XLA cannot read it, its collectives have only names."
    elif not axes.sizes:
        yield "The trace does not name the axes of its mesh; --mesh fsdp=4,tensor=2 does."
    if links is None:
        yield "The bandwidth of the chip's links is unknown; --chip names a chip of `stack chips`."
    if any("-start" in each.operation.name for each in found):
        yield "An asynchronous collective ends when the program waits for it; it may have been faster than its rate."
