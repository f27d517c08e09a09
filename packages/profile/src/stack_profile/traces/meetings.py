"""Collectives between hosts: the same executions in the traces of all hosts, and the offsets of the hosts' clocks.

Members of a collective finish when the last one has arrived and sent its part, so they end at almost the same moment.
With e[k] and s[k] the end and the start of execution k on a host's own clock, the offset of host A from host B is

    offset = median of e_A[k] - e_B[k]    max(s_A[k] - e_B[k]) <= offset <= min(e_A[k] - s_B[k])

over the quickest tenth of the executions. The limits hold because no member ends before another one has started. The
error is the duration of these executions on the last member, plus twice the standard error of the median, unless the
limits are closer. Traces do not number the executions of different hosts alike: runs of a program are matched such that
the differences vary least; of several matches that fit, the smallest offset is used. With fewer than eight runs every
match fits, because a wrong one may vary little by accident.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stack_profile.traces.collectives import Axes, Collectives, Kind, collectives_of
from stack_profile.traces.operations import PICOSECOND, Operation, Ops

__all__ = ["Formation", "HostClock", "Meetings"]


@dataclass(frozen=True)
class HostClock:
    """The clock of a host, compared with the first host's by the collectives that both are in.

    Attributes:
      name: name of the host or process.
      offset_s: time on this clock minus time on the first host's; None without common collectives.
      error_s: half of the interval that contains the offset.
      drift_s: growth of the offset per second; 0 if too small to measure.
      center_ps: time on the first host's clock at which the clocks differ by `offset_s`.
      collectives: number of compared executions.
      is_moved: True if the trace's times are corrected by the offset, which they are if it exceeds the error.
      is_regular: True if runs of the program are so regular or few that the offset may be wrong by whole runs.
    """

    name: str
    offset_s: float | None = None
    error_s: float | None = None
    drift_s: float = 0.0
    center_ps: int = 0
    collectives: int = 0
    is_moved: bool = False
    is_regular: bool = False

    def after(self, base: "HostClock") -> "HostClock":
        """Returns the comparison with the first host's clock from a comparison with `base`."""
        assert self.offset_s is not None and base.offset_s is not None, "compared clocks have offsets"
        return dataclasses.replace(
            self,
            offset_s=self.offset_s + base.offset_s,
            error_s=(self.error_s or 0.0) + (base.error_s or 0.0),
            drift_s=self.drift_s + base.drift_s,
            is_regular=self.is_regular or base.is_regular,
        )

    def correction_ps(self, time_ps: np.ndarray) -> np.ndarray:
        """Returns the difference to add to times on this clock."""
        if self.offset_s is None or not self.is_moved:
            return np.zeros(len(time_ps), np.int64)
        here = time_ps - self.center_ps - self.offset_s / PICOSECOND
        return -np.rint(self.offset_s / PICOSECOND + self.drift_s * here).astype(np.int64)


@dataclass(frozen=True)
class Meetings:
    """Executions of one collective by several hosts, one per column, in order of time.

    Attributes:
      operation: the collective on the first of the hosts.
      kind: properties of the collective.
      hosts: indices of the hosts, in the order of the rows.
      start_ps: latest start among the devices of a host, int64[hosts, executions].
      end_ps: latest end among the devices of a host, int64[hosts, executions].
      exposed_ps: time in which a host's devices ran nothing else, the mean of its devices, float64[hosts, executions].
      sent_bytes: bytes that a host sends to other hosts in one execution, see `stack_profile.analyses.transfers`, the
        mean of the hosts; None if unknown.
      routes: pairs of source and target host of a permutation.
    """

    operation: Operation
    kind: Kind
    hosts: tuple[int, ...]
    start_ps: np.ndarray
    end_ps: np.ndarray
    exposed_ps: np.ndarray
    sent_bytes: float | None
    routes: tuple[tuple[int, int], ...]

    @property
    def is_mutual(self) -> bool:
        """True if each member needs data of every other member, unlike in a permutation or a broadcast."""
        return _is_mutual(self.kind)


@dataclass(frozen=True)
class Formation:
    """The hosts of a trace.

    Attributes:
      names: names of the hosts.
      clocks: clock of each host.
      meetings: collectives between several hosts.
      runs: for each host, common number of the run by module and the host's own number of the run.
    """

    names: tuple[str, ...]
    clocks: tuple[HostClock, ...]
    meetings: tuple[Meetings, ...]
    runs: tuple[Mapping[tuple[str, int], int], ...]

    @classmethod
    def of(
        cls,
        devices: Sequence[Ops],
        prefixes: Sequence[str],
        abouts: Sequence[Mapping[str, Any]] = (),
    ) -> "Formation":
        """Compares the collectives of the processes.

        Args:
          devices: all devices.
          prefixes: start of the names of each process's devices.
          abouts: metadata of each process's capture.
        """
        names = tuple(prefix.removesuffix(":") for prefix in prefixes)
        if len(prefixes) < 2 or not any(_may_meet(each) for ops in devices for each in ops.operations):
            return cls(names, tuple(map(HostClock, names)), (), ({},) * len(names))
        about = abouts[0] if abouts else {}
        axes = Axes.of(about, len(devices))
        members = _Members.of(abouts, axes, len(prefixes))
        hosts = [
            _host_runs([each for each in devices if each.device.startswith(prefix)], axes, members, host)
            for host, prefix in enumerate(prefixes)
        ]
        clocks, shifts = _compared(names, hosts)
        runs = tuple(
            {
                (module, run): row + shift.get(module, 0)
                for module, rows in host.runs.items()
                for run, row in rows.items()
            }
            for host, shift in zip(hosts, shifts, strict=True)
        )
        return cls(names, clocks, tuple(_meetings(hosts, shifts, members)), runs)


def _may_meet(operation: Operation) -> bool:
    """Returns whether an operation may be a collective, without reading its program in full, which imports JAX."""
    opcodes = operation.instruction.opcodes if operation.instruction else ()
    return any(opcode.startswith(_COLLECTIVE) for opcode in opcodes)


_COLLECTIVE: Final = ("all-", "collective-", "ragged-", "reduce-scatter", "send", "recv")
_Key = tuple[str, str, tuple[int, ...]]  # module, operation, and the hosts that meet


@dataclass(frozen=True)
class _Members:
    """Host of each position in the programs' lists of devices.

    Attributes:
      hosts: index of the host by position, -1 for a process that is not in the trace.
      count: number of hosts in the trace.
    """

    hosts: np.ndarray
    count: int

    @classmethod
    def of(cls, abouts: Sequence[Mapping[str, Any]], axes: Axes, count: int) -> "_Members":
        processes = [each.get("process", ()) for each in abouts]
        known = len(processes) == count and all(len(each) == 2 for each in processes)
        ranks = [each[0] for each in processes] if known else list(range(count))
        total = max(processes[0][1] if known else count, max(ranks) + 1)
        # Without a record of the mesh's processes, devices are in the order of their processes.
        places = axes.processes or [place * total // max(axes.devices, 1) for place in range(axes.devices)]
        hosts = {rank: host for host, rank in enumerate(ranks)}
        return cls(np.array([hosts.get(rank, -1) for rank in places], np.int64), count)

    def hosts_meeting(self, kind: Kind, host: int) -> tuple[int, ...]:
        """Returns the hosts of this trace that a host meets in a collective, itself included; () for none."""
        if kind.between_slices:
            return tuple(range(self.count))
        members = {host}
        groups = [np.array(group) for group in kind.groups]
        sets = [set(self.hosts[group[group < len(self.hosts)]].tolist()) - {-1} for group in groups]
        # Groups of devices that share a host wait for each other.
        while grown := [each for each in sets if each & members and not each <= members]:
            members.update(*grown)
        return tuple(sorted(members)) if len(members) > 1 else ()

    def sent_bytes(self, kind: Kind, members: tuple[int, ...]) -> float | None:
        """Returns the mean bytes that a host sends to others in one execution."""
        if kind.array_bytes is None or not kind.groups:
            return None
        sent = 0.0
        for group in kind.groups:
            hosts = self.hosts[[place for place in group if place < len(self.hosts)]]
            own, counts = np.unique(hosts[np.isin(hosts, members)], return_counts=True)
            if len(own) < 2:
                continue
            if kind.name == "collective-permute":
                sent += kind.array_bytes
            elif kind.name in ("all-to-all", "ragged-all-to-all"):
                sent += kind.array_bytes * float(np.sum(counts * (len(group) - counts))) / len(group)
            else:
                sent += kind.array_bytes * (len(own) - 1) * (2 if kind.name == "all-reduce" else 1)
        return sent / len(members)

    def routes(self, kind: Kind, members: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Returns the pairs of source and target host of a permutation."""
        if kind.name != "collective-permute":
            return ()
        pairs = [tuple(self.hosts[list(group)].tolist()) for group in kind.groups if max(group) < len(self.hosts)]
        return tuple(sorted({(one, two) for one, two in pairs if one != two and one in members and two in members}))


@dataclass
class _HostRuns:
    """Executions of collectives between hosts on one host.

    Attributes:
      operations: operation and properties by key.
      columns: by key, arrays [runs, executions in a run, 3] with start, end and exposed time, NaN if missing; the runs
        are those of the key's module, in order of time.
      runs: by module, place of each run among the module's runs.
    """

    operations: dict[_Key, tuple[Operation, Kind]]
    columns: dict[_Key, np.ndarray]
    runs: dict[str, dict[int, int]]


def _host_runs(devices: Sequence[Ops], axes: Axes, members: _Members, host: int) -> _HostRuns:
    found = collectives_of(devices, axes)
    by_key: dict[_Key, list[list[Collectives]]] = {}
    runs: dict[str, dict[tuple[int, int], int]] = {}
    for collectives in found.values():
        own: dict[_Key, list[Collectives]] = {}
        for each in collectives:
            if met := members.hosts_meeting(each.kind, host):
                own.setdefault((each.operation.module, each.operation.name, met), []).append(each)
                first = runs.setdefault(each.operation.module, {})
                for run, start in zip(each.run.tolist(), each.start_ps.tolist(), strict=True):
                    place = (each.operation.program_key, run)
                    first[place] = min(first.get(place, start), start)
        for key, parts in own.items():
            by_key.setdefault(key, []).append(parts)
    order = {
        module: {place: row for row, place in enumerate(sorted(first, key=lambda place: first[place]))}
        for module, first in runs.items()
    }
    operations = {key: (parts[0][0].operation, parts[0][0].kind) for key, parts in by_key.items()}
    columns = {key: _columns(parts, order[key[0]]) for key, parts in by_key.items()}
    runs_ = {module: {run: row for (_, run), row in rows.items()} for module, rows in order.items()}
    return _HostRuns(operations, columns, runs_)


def _columns(devices: Sequence[Sequence[Collectives]], runs: Mapping[tuple[int, int], int]) -> np.ndarray:
    """Returns the executions of one collective on a host; a host starts with its last device."""
    parts = []
    for collectives in devices:
        rows = np.concatenate(
            [
                [
                    [runs[each.operation.program_key, run], start, end, exposed]
                    for run, start, end, exposed in zip(
                        each.run.tolist(),
                        each.start_ps.tolist(),
                        each.end_ps.tolist(),
                        each.exposed_ps.tolist(),
                        strict=True,
                    )
                ]
                for each in collectives
            ]
        )
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        numbers, counts = np.unique(rows[:, 0].astype(np.int64), return_counts=True)
        times = int(counts.max())
        part = np.full((len(runs), times, 3), np.nan)
        # A run that the capture cut off has fewer executions, of which the numbers are unknown.
        whole = np.isin(rows[:, 0], numbers[counts == times])
        part[numbers[counts == times]] = rows[whole, 1:].reshape(-1, times, 3)
        parts.append(part)
    times = min(part.shape[1] for part in parts)
    stacked = np.stack([part[:, :times] for part in parts])
    return np.concatenate([stacked[..., :2].max(axis=0), stacked[..., 2:].mean(axis=0)], axis=-1)


def _compared(
    names: Sequence[str], hosts: Sequence[_HostRuns]
) -> tuple[tuple[HostClock, ...], list[Mapping[str, int]]]:
    """Returns the clocks, and for each host by module how many runs earlier its trace begins than the first host's."""
    nothing = dict.fromkeys((key[0] for host in hosts for key in host.columns), 0)
    clocks: dict[int, HostClock] = {0: HostClock(names[0], 0.0, 0.0)}
    shifts: dict[int, Mapping[str, int]] = {0: nothing}
    waiting = list(range(1, len(hosts)))
    while waiting:
        found = next(_pairs(hosts, waiting, clocks), None)
        if found is None:
            # Without a path to the first host, nothing compares their clocks with its clock.
            host = waiting.pop(0)
            clocks[host], shifts[host] = HostClock(names[host]), nothing
            continue
        known, host, pair = found
        base, own = clocks[known], pair.clock(names[host])
        clocks[host] = own.after(base) if base.offset_s is not None else HostClock(names[host])
        shifts[host] = {module: shifts[known].get(module, 0) + shift for module, shift in pair.shifts.items()}
        waiting.remove(host)
    found_clocks = (clocks[host] for host in range(len(hosts)))
    moved = (
        dataclasses.replace(each, is_moved=abs(each.offset_s or 0.0) > (each.error_s or 0.0)) for each in found_clocks
    )
    return tuple(moved), [shifts[host] for host in range(len(hosts))]


def _pairs(
    hosts: Sequence[_HostRuns], waiting: Sequence[int], known: Collection[int]
) -> Iterator[tuple[int, int, "_Pair"]]:
    """Yields a compared host, another host and their comparison, the first compared host first."""
    for base in known:
        for host in waiting:
            if pair := _Pair.of(hosts[base], hosts[host]):
                yield base, host, pair


@dataclass(frozen=True)
class _Pair:
    """Common executions of two hosts.

    Attributes:
      shifts: by module, the number of the run on the first host minus the number of the same run on the second.
      differences: end on the second host minus end on the first, and the lower and upper limits of the offset that the
        execution implies, float64[3, executions].
      quickest: the shorter of both durations.
      time: end on the first host.
      is_regular: see `HostClock`.
    """

    shifts: Mapping[str, int]
    differences: np.ndarray
    quickest: np.ndarray
    time: np.ndarray
    is_regular: bool

    @classmethod
    def of(cls, first: _HostRuns, second: _HostRuns) -> "_Pair | None":
        shared = [key for key in first.columns.keys() & second.columns.keys() if _is_mutual(first.operations[key][1])]
        both = {key: _same_times(first.columns[key], second.columns[key]) for key in sorted(shared)}
        sizes: dict[str, int] = {}
        for key, (one, _) in both.items():
            sizes[key[0]] = sizes.get(key[0], 0) + int(np.isfinite(one[..., 1]).sum())
        shifts: dict[str, int] = {}
        offset: float | None = None
        is_regular = False
        for module in sorted(sizes, key=lambda each: -sizes[each]):
            pairs = [each for key, each in both.items() if key[0] == module]
            found = _shift(pairs, offset)
            if found is None:
                continue
            shifts[module], median, regular = found
            if offset is None:
                offset, is_regular = median, regular
        columns = [_overlapping(*each, shifts[key[0]]) for key, each in both.items() if key[0] in shifts]
        if not columns:
            return None
        one, two = (np.concatenate([each[side].reshape(-1, 3) for each in columns]) for side in (0, 1))
        finite = np.isfinite(one[:, 1]) & np.isfinite(two[:, 1])
        one, two = one[finite], two[finite]
        limits = [two[:, 1] - one[:, 1], two[:, 0] - one[:, 1], two[:, 1] - one[:, 0]]
        quickest = np.minimum(one[:, 1] - one[:, 0], two[:, 1] - two[:, 0])
        return cls(shifts, np.stack(limits), quickest, one[:, 1], is_regular) if len(one) else None

    def clock(self, name: str) -> HostClock:
        """Estimates the second host's clock relative to the first host's."""
        count = len(self.time)
        chosen = np.argsort(self.quickest, kind="stable")[: max(min(count, _FEWEST), -(-count // 10))]
        center = float(np.median(self.time[chosen]))
        drift = _drift(self.time[chosen] - center, self.differences[0][chosen])
        ends, low, high = self.differences - drift * (self.time - center)
        offset, spread = _median(ends[chosen])
        error = float(np.median(self.quickest[chosen])) + 2 * spread
        lowest, highest = float(low.max()), float(high.min())
        if lowest <= offset <= highest:
            error = min(error, max(offset - lowest, highest - offset))
        times = (offset * PICOSECOND, max(error, 1.0) * PICOSECOND)
        return HostClock(name, *times, drift, round(center), count, is_regular=self.is_regular)


_FEWEST: Final = 16  # minimum number of executions that an estimate uses


def _is_mutual(kind: Kind) -> bool:
    return kind.name not in ("collective-permute", "collective-broadcast")


def _same_times(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the executions in a run to the common number."""
    times = min(first.shape[1], second.shape[1])
    return first[:, :times], second[:, :times]


def _overlapping(first: np.ndarray, second: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same runs of both hosts; `shift` is the number on the first host minus the number on the second."""
    start, count = max(shift, 0), min(len(first), len(second) + shift) - max(shift, 0)
    return first[start : start + max(count, 0)], second[start - shift : start - shift + max(count, 0)]


def _shift(pairs: Sequence[tuple[np.ndarray, np.ndarray]], offset: float | None) -> tuple[int, float, bool] | None:
    """Finds the runs that are the same on both hosts: returns shift, median difference, and whether others fit as well.

    Args:
      pairs: ends [runs, executions, ...] of collectives of one module on both hosts.
      offset: difference of the clocks if another module has told it.
    """
    # A hundred executions per run suffice.
    first, second = (np.concatenate([each[side] for each in pairs], axis=1)[:, :_MOST_COLUMNS] for side in (0, 1))
    durations = np.concatenate([np.ravel(each[..., 1] - each[..., 0]) for each in (first, second)])
    fewest = max(min(len(first), len(second)) // 2, 1)
    found: list[tuple[int, float, float]] = []
    for shift in range(fewest - len(second), len(first) - fewest + 1):
        one, two = _overlapping(first[..., 1], second[..., 1], shift)
        differences = (two - one)[np.isfinite(two - one)]
        if len(differences):
            low, median, high = np.percentile(differences, (10, 50, 90))
            found.append((shift, float(median), float(high - low)))
    if not found:
        return None
    # A few regular runs may vary less by accident if they are matched wrongly. Clocks seldom differ by more than a run,
    # so a larger offset needs differences that are clearly more equal.
    jitter = float(np.nanpercentile(durations, 25))
    limit = 4 * min(spread for _, _, spread in found) + jitter
    has_few = min(len(first), len(second)) < _FEW_RUNS
    fitting = [each for each in found if has_few or each[2] <= limit]
    shift, median, _ = min(fitting, key=lambda each: abs(each[1] - (offset or 0.0)))
    return shift, median, len(fitting) > 1


_MOST_COLUMNS: Final = 100
_FEW_RUNS: Final = 8


def _median(values: np.ndarray) -> tuple[float, float]:
    """Returns the median and its standard error, from the median absolute deviation."""
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - median)))
    return median, 1.2533 * deviation / len(values) ** 0.5


def _drift(time: np.ndarray, differences: np.ndarray) -> float:
    """Returns the slope of the differences over time (Theil and Sen), 0 unless it exceeds four standard errors."""
    rows = np.linspace(0, len(time) - 1, min(len(time), _MOST_POINTS)).astype(int)
    time, differences = time[rows], differences[rows]
    if len(time) < _FEWEST or np.ptp(time) == 0:
        return 0.0
    above, below = np.triu_indices(len(time), 1)
    apart = np.abs(time[below] - time[above]) > np.ptp(time) / 4  # close points tell little about a slope
    slope = float(np.median((differences[below] - differences[above])[apart] / (time[below] - time[above])[apart]))
    _, error = _median(differences - slope * time)
    return slope if abs(slope) * float(time.std()) > 4 * error else 0.0


_MOST_POINTS: Final = 300


def _meetings(
    hosts: Sequence[_HostRuns], shifts: Sequence[Mapping[str, int]], members: "_Members"
) -> Iterator[Meetings]:
    for key in dict.fromkeys(key for host in hosts for key in host.columns):
        module, _, met = key
        if not all(key in hosts[host].columns and module in shifts[host] for host in met):
            continue
        parts = [(shifts[host][module], hosts[host].columns[key]) for host in met]
        first = max(shift for shift, _ in parts)
        last = min(shift + len(columns) for shift, columns in parts)
        times = min(columns.shape[1] for _, columns in parts)
        if last <= first:
            continue
        columns = np.stack([columns[first - shift : last - shift, :times].reshape(-1, 3) for shift, columns in parts])
        columns = columns[:, np.isfinite(columns).all(axis=(0, 2))]
        columns = columns[:, np.argsort(columns[0, :, 0], kind="stable")]
        if columns.shape[1]:
            start, end, exposed = np.moveaxis(columns, -1, 0)
            operation, kind = hosts[met[0]].operations[key]
            times_ps = (start.astype(np.int64), end.astype(np.int64), exposed)
            yield Meetings(operation, kind, met, *times_ps, members.sent_bytes(kind, met), members.routes(kind, met))
