"""Roofline: FLOPs and bytes of each operation from the HLO, its time from the trace, compared with the chip's peaks.

An operation of F FLOPs that moves B bytes takes at least

    ideal_s = max(F / peak FLOP/s of its dtype, B / memory bandwidth)

and reaches the share ideal_s / self_s of the roof. Bytes count each array as read and written once and ignore caches:
an operation on cached data can be faster than its ideal. (Williams et al., https://doi.org/10.1145/1498765.1498785)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stack_core.chips import machine
from stack_core.report.fields import number
from stack_core.report.plots import Chart, Series
from stack_profile.analyses.ops import Grouping, chosen_devices, grouping
from stack_profile.answer import Answer
from stack_profile.traces.categories import category_of
from stack_profile.traces.operations import Operation
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.chips import Chip
    from stack_core.programs.hlo_costs import InstructionCost

__all__ = ["Roof", "RooflineRow", "chip_of", "ideal_times", "roof_of", "roofline", "roofline_of"]


@dataclass(frozen=True)
class Roof:
    """The peaks of a trace's device.

    Attributes:
      chip: the chip; None if unknown.
      sharing: number of the trace's devices that share its peaks.
      note: origin of the peaks, or the reason why they are unknown.
    """

    chip: "Chip | None"
    sharing: int
    note: str

    def ideal(self, operation: Operation) -> tuple[float | None, str | None]:
        """Returns the seconds of one execution at the peaks, and the binding peak, "compute" or "memory"."""
        return _ideal(operation, self.chip, self.sharing)


def roof_of(trace: Trace) -> Roof:
    """Returns the peaks of the trace's own chip."""
    chip, note = _chip_of(trace)
    return Roof(chip, _sharing(chip, len(trace.devices)), note)


@dataclass(frozen=True)
class RooflineRow:
    """One operation, summed over all of its executions.

    Attributes:
      name: name of the instruction.
      program: name of its module.
      category: category of work (`stack_profile.traces.categories`).
      line: Python line; "" if unknown.
      self_s: self time.
      occurrences: number of executions.
      runs_expected: executions per run of the program, from the trip counts of its loops; None for dynamic trip counts.
      flops, traffic_bytes: totals over all executions; None if unknown, as for the FLOPs of custom calls.
      rate_flops_s, rate_bytes_s: achieved rates, `flops` and `traffic_bytes` over `self_s`.
      intensity: FLOPs per byte.
      bound: "compute" or "memory", whichever takes longer at the peaks.
      ideal_s: time at the chip's peaks.
      ideal_self_share: `ideal_s / self_s`; None without the chip's peaks.
    """

    name: str
    program: str
    category: str
    line: str
    self_s: float
    occurrences: int
    runs_expected: int | None
    flops: int | None
    traffic_bytes: int | None
    rate_flops_s: float | None
    rate_bytes_s: float | None
    intensity: float | None
    bound: str | None
    ideal_s: float | None
    ideal_self_share: float | None


def roofline(
    trace: Trace, *, by: Grouping = "op", chip: str | None = None, device: str | None = None
) -> Answer[RooflineRow]:
    """Compare operations, individually and in total, with the chip's peaks.

    Args:
      by: grouping of the operations, as in `ops`. Rates and shares cover operations with known costs.
      chip: name of a chip that `stack chips` lists, by default the trace's own.
      device: one device instead of all of them.

    Raises:
      UnknownName: the chip or the device is unknown.
    """
    return _roofline(trace, *chip_of(trace, chip), device, by)


def roofline_of(trace: Trace, chip: "Chip", *, device: str | None = None) -> Answer[RooflineRow]:
    """Computes the roofline against a chip that need not be registered."""
    return _roofline(trace, chip, f"Peaks: {chip.provenance}.", device)


def chip_of(trace: Trace, name: str | None = None) -> "tuple[Chip | None, str]":
    """Returns a chip that `stack chips` lists, by default the trace's own or None, and a note about its peaks.

    Raises:
      UnknownName: the chip is not registered.
    """
    if name is None:
        return _chip_of(trace)
    chip = _registered_chip(name)
    return chip, f"Peaks: {chip.provenance}."


def _registered_chip(name: str) -> "Chip":
    """Returns a chip that `stack chips` lists, measuring it first if it is this machine's CPU.

    Raises:
      UnknownName: the chip is not registered.
    """
    from stack_core.abi.plugins import registries

    chip = registries.chips[name]
    return chip() if callable(chip) else chip


def _roofline(
    trace: Trace, chip: "Chip | None", note: str, device: str | None, by: Grouping = "op"
) -> Answer[RooflineRow]:
    devices = chosen_devices(trace, device)
    sharing = _sharing(chip, len(trace.devices))
    measured = [_Measured(*total) for each in devices for total in each.totals()]
    rows = [_row(each, chip, sharing) for each in measured]
    groups: dict[str, list[RooflineRow]] = {}
    for each, row in zip(measured, rows, strict=True) if by != "op" else ():
        groups.setdefault(grouping(by)(each.operation), []).append(row)
    shown = rows if by == "op" else [_sum(name, found) for name, found in groups.items()]
    busy_s = sum((each.busy_s for each in devices), 0.0)
    unreadable = [program.name for program in trace.ran if program.costs is None]
    return Answer(
        name="roofline" if by == "op" else f"roofline by {by}",
        facts=_totals(rows, chip, busy_s),
        row_type=RooflineRow,
        rows=tuple(sorted(shown, key=lambda row: -row.self_s)),
        notes=(note, *_notes(rows, unreadable), *trace.problems),
        plots=tuple(_charts(rows, chip, sharing)),
    )


def _sum(name: str, rows: Sequence[RooflineRow]) -> RooflineRow:
    """Sums the rows of a group; "" stands for properties that differ."""
    counted = [row for row in rows if row.flops is not None and row.traffic_bytes is not None]
    roofed = [row for row in rows if row.ideal_s is not None]
    flops, traffic = (sum(getattr(row, field) for row in counted) for field in ("flops", "traffic_bytes"))
    counted_s, ideal_s = sum(row.self_s for row in counted), sum(row.ideal_s or 0.0 for row in roofed)
    memory_s = sum(row.ideal_s or 0.0 for row in roofed if row.bound == "memory")
    common = {
        field: next(iter(found)) if len(found := {getattr(row, field) for row in rows}) == 1 else ""
        for field in ("program", "category", "line")
    }
    return RooflineRow(
        name=name,
        self_s=sum(row.self_s for row in rows),
        occurrences=sum(row.occurrences for row in rows),
        runs_expected=None,
        flops=flops if counted else None,
        traffic_bytes=traffic if counted else None,
        rate_flops_s=_ratio(flops, counted_s),
        rate_bytes_s=_ratio(traffic, counted_s),
        intensity=_ratio(flops, traffic),
        bound=("memory" if 2 * memory_s >= ideal_s else "compute") if ideal_s else None,
        ideal_s=ideal_s if roofed else None,
        ideal_self_share=_ratio(ideal_s, sum(row.self_s for row in roofed)) if roofed else None,
        **common,
    )


def _charts(rows: Sequence[RooflineRow], chip: "Chip | None", sharing: int) -> Iterator[Chart]:
    """Plots the operations that have FLOPs below the chip's compute and memory roofs."""
    found = [row for row in rows if row.intensity and row.rate_flops_s]
    if not found:
        return
    points = [(row.intensity or 0.0, row.rate_flops_s or 0.0) for row in found]
    labels = [f"{row.name} {row.line}, {number('_s', row.self_s)}" for row in found]
    series = [Series("operations", "dots", points, labels)]
    series += _roofs(chip, [x for x, _ in points], sharing) if chip else []
    yield Chart("Operations with FLOPs below the chip's roofs", "intensity", "rate_flops_s", series, log=True)


def _roofs(chip: "Chip", intensities: Sequence[float], sharing: int) -> list[Series]:
    """Returns one roof per dtype: memory bandwidth up to the ridge point, peak FLOP/s from there on."""
    bandwidth = chip.hbm_bandwidth_bytes_s
    if not bandwidth:
        return []
    ridges = {dtype: flops_s / bandwidth for dtype, flops_s in sorted(chip.peak_flops.items())}
    # Each roof should be visible on both sides of its ridge.
    low, high = min((*ridges.values(), *intensities)) / 2, max((*ridges.values(), *intensities)) * 2
    return [
        Series(f"roof in {dtype}", "line", [(x, bandwidth * min(x, ridge) / sharing) for x in (low, ridge, high)])
        for dtype, ridge in ridges.items()
    ]


def _sharing(chip: "Chip | None", devices: int) -> int:
    """Returns the number of devices that share the chip's peaks: all host devices of a CPU, otherwise 1."""
    return devices if chip is not None and chip.kind == "cpu" else 1


def _chip_of(trace: Trace) -> "tuple[Chip | None, str]":
    """Returns the chip of the trace, or None for unknown peaks, and a note for the user."""
    from stack_core.abi.plugins import registries
    from stack_core.chips.devices import row_name

    # Traces of other tools lack `about`, but their planes name CPU devices.
    is_cpu = bool(trace.devices) and all("CPU:" in each.device for each in trace.devices)
    kind = trace.about.get("device_kind", "cpu" if is_cpu else _noted_kind(trace))
    name = None if kind is None else row_name(str(kind))
    if name is None:
        what = "The trace does not name its chip" if kind is None else f"No row is registered for the chip {kind!r}"
        return None, f"{what}, so its peaks are unknown: name one with --chip, `stack chips` lists them."
    if not callable(registries.chips[name]):
        chip = _registered_chip(name)
        return chip, f"Peaks: {chip.provenance}."
    # A CPU's peaks are measured on this machine, so they only apply to a trace captured on the same CPU and cores.
    here = (machine.cpu_model(), machine.usable_cores())
    there = (trace.about.get("cpu", here[0]), trace.about.get("cores", here[1]))
    if there != here:
        return None, f"The trace is from another machine ({there[1]} cores of {there[0]}): its peaks are unknown."
    chip = _registered_chip(name)
    return chip, f"Peaks of this machine, {chip.provenance}."


def _noted_kind(trace: Trace) -> str | None:
    """Returns the kind of chip that the trace's planes name, in JAX's spelling: "TPU v6 lite" for "TPU v6 Lite"."""
    planes = [plane.stats for space in trace.spaces for plane in space.planes]
    kinds = {plane.get("device_type_string", plane.get("gpu_device_name")) for plane in planes} - {None}
    kind = str(kinds.pop()) if len(kinds) == 1 else ""
    return f"TPU{kind[3:].lower()}" if kind.startswith("TPU") else kind or None


@dataclass(frozen=True)
class _Measured:
    operation: Operation
    self_s: float
    count: int


def _row(measured: _Measured, chip: "Chip | None", sharing: int) -> RooflineRow:
    operation, self_s, count = measured.operation, measured.self_s, measured.count
    cost = operation.cost
    flops = None if operation.flops is None else operation.flops * count
    traffic = cost.traffic_bytes * count if cost else None
    # Devices that share a chip reach only their part of its peaks.
    ideal_s, bound = _ideal(operation, chip, count * sharing)
    if operation.extra:  # the longest kernel has the costs of the call
        flops, traffic, ideal_s = 0, 0, 0.0
    source = operation.instruction.source() if operation.instruction else None
    return RooflineRow(
        name=operation.name,
        program=operation.module,
        category=category_of(operation),
        line=str(source) if source else "",
        self_s=self_s,
        occurrences=count,
        runs_expected=cost.times if cost else None,
        flops=flops,
        traffic_bytes=traffic,
        rate_flops_s=_ratio(flops, self_s),
        rate_bytes_s=_ratio(traffic, self_s),
        intensity=_ratio(flops, traffic),
        bound=bound,
        ideal_s=ideal_s,
        ideal_self_share=_ratio(ideal_s, self_s),
    )


def _ideal(operation: Operation, chip: "Chip | None", times: int) -> tuple[float | None, str | None]:
    """Computes the seconds of some executions at the chip's peaks, and the binding peak; None if unknown."""
    compute_s, memory_s = ideal_times(operation.cost, chip, times)
    if operation.flops is None or compute_s is None or memory_s is None:
        return None, None
    ideal_s = max(compute_s, memory_s)
    return ideal_s, ("compute" if compute_s == ideal_s else "memory") if ideal_s else None


def ideal_times(cost: "InstructionCost | None", chip: "Chip | None", times: int) -> tuple[float | None, float | None]:
    """Computes the seconds at the chip's peak FLOP/s and at its peak bandwidth."""
    if cost is None or chip is None:
        return None, None
    compute_s, bandwidth = cost.flops.ideal_s(chip), chip.hbm_bandwidth_bytes_s
    return (
        None if compute_s is None else compute_s * times,
        None if bandwidth is None else cost.traffic_bytes * times / bandwidth,
    )


def _ratio(part: int | float | None, total: int | float | None) -> float | None:
    return part / total if part is not None and total else None


def _totals(rows: Sequence[RooflineRow], chip: "Chip | None", busy_s: float) -> dict[str, Any]:
    known = [row for row in rows if row.flops is not None and row.traffic_bytes is not None]
    roofed = [row for row in rows if row.ideal_s is not None]
    flops = sum(row.flops or 0 for row in known) if known else None
    traffic = sum(row.traffic_bytes or 0 for row in known) if known else None
    ideal_s = sum((row.ideal_s or 0.0 for row in roofed), 0.0) if roofed else None
    counted_s = sum((row.self_s for row in known), 0.0) if rows else None
    return {
        "chip": chip.kind if chip else None,
        "busy_s": busy_s if rows else None,
        "counted_s": counted_s,
        "uncounted_s": sum((row.self_s for row in rows if row.flops is None or row.traffic_bytes is None), 0.0)
        if rows
        else None,
        "counted_busy_share": _ratio(counted_s, busy_s),
        "flops": flops,
        "traffic_bytes": traffic,
        # Over all busy time: operations without costs lower these rates.
        "rate_flops_s": _ratio(flops, busy_s),
        "rate_bytes_s": _ratio(traffic, busy_s),
        "ideal_s": ideal_s,
        "ideal_busy_share": _ratio(ideal_s, busy_s),
        "peak_flops_s": dict(chip.peak_flops) if chip else None,
        "peak_bytes_s": chip.hbm_bandwidth_bytes_s if chip else None,
    }


def _notes(rows: Sequence[RooflineRow], unreadable: Sequence[str]) -> Iterator[str]:
    if not rows:
        yield "No data: the trace has no operations of any device."
        return
    yield (
        "Ideal is the time at the chip's peaks. Bytes ignore caches, so it can exceed 100% of self. Counted is the "
        "time of operations with known FLOPs and bytes; other operations count only as busy."
    )
    if unreadable:
        yield f"This version of XLA cannot read {', '.join(unreadable)}: the costs of their operations are unknown."
    uncounted = [row.name for row in rows if row.flops is None and row.traffic_bytes is not None]
    if uncounted:
        yield f"Custom calls do not report their FLOPs, which the sums omit: {', '.join(uncounted[:5])}."
    if any(row.runs_expected is None and row.flops for row in rows):
        yield "Loops with a data-dependent number of iterations count as traced, without an expected number of runs."
