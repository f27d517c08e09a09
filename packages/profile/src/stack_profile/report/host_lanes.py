"""Lanes of the hosts of a run: each waits for the last one, then all transfer."""

from collections.abc import Iterator

import numpy as np

from stack_profile.analyses.hosts import arrivals_of
from stack_profile.report.lanes import AddKinds, Lane
from stack_profile.traces.intervals import tracks
from stack_profile.traces.trace import Trace

__all__ = ["host_lanes"]


def host_lanes(trace: Trace, add: AddKinds) -> Iterator[Lane]:
    """Yields a lane for each host with its waits for others and its transfers, on the common clock."""
    formation = trace.formation
    arrivals = arrivals_of(formation, trace.clocks)
    for host, name in enumerate(formation.names):
        kinds: dict[tuple[str, str], int] = {}
        columns = [np.zeros((3, 0), np.int64)]

        def rows_of(label: str, category: str, start: np.ndarray, end: np.ndarray) -> np.ndarray:
            kind = kinds.setdefault((label, category), len(kinds))  # noqa: B023, called in this iteration only
            return np.stack([np.full(len(start), kind), start, end])

        for each in (each for each in arrivals if host in each.meetings.hosts):
            row = each.meetings.hosts.index(host)
            start, end = each.meetings.start_ps[row], each.meetings.end_ps[row]
            arrived = start + each.wait_ps[row]
            for place, other in enumerate(each.meetings.hosts):
                waits = (each.last == place) & (arrived > start)
                label = f"waits for {formation.names[other]}"
                columns.append(rows_of(label, "wait for a host", start[waits], arrived[waits]))
            columns.append(rows_of(each.meetings.operation.name, "transfer", arrived, np.maximum(end, arrived)))
        kind, start, end = np.concatenate(columns, axis=1)
        if not len(kind):
            continue
        first = add([{"type": "work", "name": label, "category": category} for label, category in kinds])
        order = np.lexsort((-end, start))
        kind, start, end = kind[order], start[order], end[order]
        row = tracks(start, end)
        yield Lane(
            "hosts",
            name,
            "work",
            int(row.max()) + 1,
            start,
            end - start,
            (end - start).astype(float),
            first + kind,
            row,
        )
