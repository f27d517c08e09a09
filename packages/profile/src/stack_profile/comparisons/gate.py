"""Regression gate: checks whether a program became slower or larger than a baseline, and which lines are at fault.

Times of steps and compilations are measured, with a confidence interval. A change is a regression if it exceeds the
allowed one and is significant, within the limit if its entire interval is, and otherwise undecided. Memory and FLOPs
are read from the program and are exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from stack_core.report.fields import number
from stack_profile.analyses.compile import compilations
from stack_profile.answer import Answer
from stack_profile.comparisons.comparison import TRIM
from stack_profile.comparisons.costs import CostRow, Costs, costs_of
from stack_profile.comparisons.culprits import culprits
from stack_profile.comparisons.diff import about_differences, definitions, step_program
from stack_profile.comparisons.matching import Site, match
from stack_profile.comparisons.samples import samples_of
from stack_profile.comparisons.significance import Difference, difference
from stack_profile.errors import ProfileError
from stack_profile.traces.trace import Trace

__all__ = ["ALLOWED", "CONFIDENCE", "GateRow", "GateSide", "GateVerdict", "Metric", "gate"]

Metric = Literal["step_time", "memory", "flops", "compile_time"]
GateVerdict = Literal["regressed", "within", "undecided"]

ALLOWED: Final[Mapping[Metric, float]] = {"step_time": 0.03, "memory": 0.03, "flops": 0.03, "compile_time": 0.25}
"""By which share of the baseline each metric may grow."""

CONFIDENCE: Final = 0.9  # two-sided level: each end of the interval has an error of 5%
_UNITS: Final[Mapping[Metric, str]] = {"step_time": "s", "memory": "bytes", "flops": "flops", "compile_time": "s"}
_COLUMNS: Final[Mapping[Metric, str]] = {"memory": "memory_bytes", "flops": "flops", "compile_time": "instructions"}
_SHOWN: Final = 3


@dataclass(frozen=True)
class GateRow:
    """A metric compared with its baseline.

    Attributes:
      metric: name of the metric.
      unit: unit of `base` and `new`: "s", "bytes" or "flops".
      base, new: values of the two sides.
      change_base_share: (new - base) / base; None for a base of 0.
      low_base_share, high_base_share: confidence interval of the change; None if unknown.
      allowed_base_share: largest change that is not a regression.
      verdict: "regressed", "within" or "undecided".
      at_fault: parts that grew most, the largest first; empty if nothing grew.
    """

    metric: Metric
    unit: str
    base: float
    new: float
    change_base_share: float | None
    low_base_share: float | None
    high_base_share: float | None
    allowed_base_share: float
    verdict: GateVerdict
    at_fault: tuple[str, ...]


@dataclass(frozen=True)
class GateSide:
    """A program as captures, costs, or both.

    Attributes:
      traces: captures of the program.
      step_s: seconds of the steps of each capture; empty if any capture has unknown steps.
      costs: static costs; None if unknown.
      compile_s: seconds of the compilations in each process.
    """

    traces: tuple[Trace, ...]
    step_s: tuple[np.ndarray, ...]
    costs: Costs | None
    compile_s: tuple[tuple[float, ...], ...]

    @classmethod
    def of_traces(cls, traces: Sequence[Trace]) -> "GateSide":
        """Makes a side from captures, with the costs of the program whose runs are the steps."""
        program = step_program(traces[0])
        costs = costs_of(program, about=traces[0].about) if program else None
        compile_s = [_compile_s(trace, program.name) for trace in traces] if program else []
        samples = [found for trace in traces if (found := samples_of(trace)) is not None]
        step_s = tuple(each.step_s for each in samples) if len(samples) == len(traces) else ()
        return cls(tuple(traces), step_s, costs, tuple(found for found in compile_s if found))

    @classmethod
    def of_costs(cls, costs: Costs) -> "GateSide":
        return cls((), (), costs, (costs.compile_s,) if costs.compile_s else ())

    def metrics(self) -> set[Metric]:
        """Returns the metrics known for this side."""
        known: dict[Metric, bool] = {
            "step_time": bool(self.step_s),
            "memory": self.costs is not None and self.costs.memory_bytes is not None,
            "flops": self.costs is not None and self.costs.flops is not None,
            "compile_time": bool(self.compile_s),
        }
        return {metric for metric, there in known.items() if there}


def _compile_s(trace: Trace, program: str) -> tuple[float, ...]:
    """Returns the mean seconds of a program's compilations during a capture, empty without compilations."""
    rows = [row for row in compilations(trace).rows if row.name == program]
    return tuple(row.compile_s / row.compilations for row in rows if row.compile_s and row.compilations)


def gate(
    base: GateSide, new: GateSide, *, metrics: Sequence[Metric] = (), allowed: Mapping[Metric, float] = ALLOWED
) -> Answer[GateRow]:
    """Compares a program with its baseline.

    Args:
      base, new: sides of the comparison.
      metrics: metrics to compare, by default all metrics known for both sides; compile times if each has several.
      allowed: allowed growth of each metric as a share of the baseline; defaults come from `ALLOWED`.

    Raises:
      ProfileError: a requested metric is unknown for a side, or the sides share no metric.
    """
    chosen = _chosen(base, new, metrics)
    rows = tuple(_row(metric, base, new, {**ALLOWED, **allowed}[metric]) for metric in chosen)
    return Answer(
        name="gate",
        facts={verdict: sum(row.verdict == verdict for row in rows) for verdict in get_args(GateVerdict)},
        row_type=GateRow,
        rows=rows,
        notes=tuple(_notes(base, new, rows)),
    )


def _chosen(base: GateSide, new: GateSide, metrics: Sequence[Metric]) -> Sequence[Metric]:
    known = base.metrics() & new.metrics()
    if missing := [metric for metric in metrics if metric not in known]:
        without = [name for name, side in (("base", base), ("new", new)) if not side.metrics().issuperset(missing)]
        raise ProfileError(
            f"{', '.join(missing)} of {' and '.join(without)} is unknown. Step times need captures of several steps on "
            "both sides; memory and FLOPs need the program, from captures or `stack profile costs`; compile times need "
            "a compilation during the capture, or `stack profile costs`."
        )
    # The variation of a single compilation is unknown.
    several = min(sum(map(len, side.compile_s)) for side in (base, new)) > 1
    found = metrics or [
        metric for metric in get_args(Metric) if metric in known and (metric != "compile_time" or several)
    ]
    if not found:
        raise ProfileError(
            "The sides have no metric in common. Compare captures with captures, or costs of programs with costs."
        )
    return found


def _row(metric: Metric, base: GateSide, new: GateSide, allowed: float) -> GateRow:
    if metric in ("memory", "flops"):
        before, after = (float(getattr(side.costs, _COLUMNS[metric])) for side in (base, new))
        change = (after - before) / before if before else None
        grew = after > before if change is None else change > allowed
        verdict: GateVerdict = "regressed" if grew else "within"
        fault = _costlier(metric, base, new) if grew else ()
        return GateRow(metric, _UNITS[metric], before, after, change, None, None, allowed, verdict, tuple(fault))
    # Compilations are too few to trim.
    found = _step_times(base, new, trim=TRIM) if metric == "step_time" else _compile_times(base, new)
    before, change, low, high = float(found.before[0]), *_shares(found)
    verdict = _judge(change, low, high, allowed)
    fault = (
        ()
        if verdict == "within"
        else culprits(base.traces, new.traces)
        if metric == "step_time"
        else _costlier(metric, base, new)
    )
    return GateRow(
        metric, _UNITS[metric], before, float(found.after[0]), change, low, high, allowed, verdict, tuple(fault)
    )


def _judge(change: float, low: float | None, high: float | None, allowed: float) -> GateVerdict:
    if low is None or high is None:
        return "undecided"
    # Both: large enough to matter, and certain enough to fail a build.
    if change > allowed and low > 0:
        return "regressed"
    return "within" if high <= allowed else "undecided"


def _step_times(base: GateSide, new: GateSide, *, trim: float) -> Difference:
    return difference(*([each[:, None] for each in side.step_s] for side in (base, new)), trim=trim)


def _compile_times(base: GateSide, new: GateSide) -> Difference:
    return difference(*([np.array([each]).T for each in side.compile_s] for side in (base, new)))


def _shares(found: Difference) -> tuple[float, float | None, float | None]:
    """Returns the change and the ends of its interval, as shares of the value before."""
    low, high = (None if np.isnan(end[0]) else float(end[0] / found.before[0]) for end in found.interval(CONFIDENCE))
    return float(found.change[0] / found.before[0]), low, high


def _costlier(metric: Metric, base: GateSide, new: GateSide) -> Iterator[str]:
    """Yields the lines whose costs grew most."""
    column = _COLUMNS[metric]
    before, after = (side.costs.rows if side.costs else () for side in (base, new))
    found = []
    for each in match(*([_site(row) for row in rows] for rows in (before, after))):
        old, now = (
            sum(getattr(rows[place], column) for place in places)
            for rows, places in ((before, each.before), (after, each.after))
        )
        if now > old:
            places = [after[place] for place in each.after]
            found.append((old - now, max(places, key=lambda row: getattr(row, column)), old, now))
    for _, row, old, now in sorted(found, key=lambda entry: entry[0])[:_SHOWN]:
        what = " instructions" if metric == "compile_time" else ""
        layer = f" ({row.layer})" if row.layer else ""
        yield f"{row.line or 'no line'}{layer}: {number(column, old)} -> {number(column, now)}{what}"


def _site(row: CostRow) -> Site:
    # Costs lack operations, so their lines are matched by place and layer only.
    path, _, line = row.line.rpartition(":")
    file = path.replace("\\", "/").rpartition("/")[2]
    return Site("", row.layer, "", "", frozenset(), "", (), file=file, function=row.function, line=int(line or 0))


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '-'}{number('_share', abs(share))}"


def _notes(base: GateSide, new: GateSide, rows: Sequence[GateRow]) -> Iterator[str]:
    if base.traces and new.traces:
        yield from definitions(base.traces[0], new.traces[0])
    elif base.costs and new.costs:
        yield from about_differences(base.costs.about, new.costs.about)
    for row in rows:
        if row.metric == "step_time":
            yield from _notes_of_steps(base, new, row)
    for side in (base, new):
        # The first note is general, the rest are about this program.
        yield from side.costs.notes[1:] if side.costs else ()
        yield from (problem for trace in side.traces for problem in trace.problems)


def _notes_of_steps(base: GateSide, new: GateSide, row: GateRow) -> Iterator[str]:
    mean = _step_times(base, new, trim=0.0)
    change, low, _ = _shares(mean)
    if row.verdict != "regressed" and change > row.allowed_base_share and low is not None and low > 0:
        yield f"The mean of all steps, stalls included, changed by {_signed(change)}; the verdict is of a trimmed mean."
    if not mean.of_captures:
        yield (
            "With one capture per side, changes of the machine and of the program look the same. Take several per "
            "side, alternately."
        )
