"""Differences between two programs, or two runs of one program, in seconds per step.

Operations are matched by their origin and computation. Their seconds are trimmed means over the steps. The remainder,
such as stalls, is a row of its own, so all rows sum to the difference of the busy time. A row is labelled slower or
faster if its change is significant and large enough to matter.

With several captures on both sides, Student's t-test compares the captures' means. With one capture on a side, each
change is tested against the changes of the program's other operations: a machine that is busier or clocked differently
changes all of them, each slightly differently, between steps and between captures. The change common to all operations
is reported as a fact. A row that takes as long as before is not labelled, however the rest changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from stack_core.report.fields import number
from stack_profile.analyses.compile import argument_differences
from stack_profile.answer import Answer
from stack_profile.comparisons.comparison import TRIM, Comparison, DiffGrouping, Group, Place, grouped_difference
from stack_profile.comparisons.samples import Side
from stack_profile.traces.hlo import Program
from stack_profile.traces.trace import Trace

__all__ = [
    "MIN_CHANGE",
    "DiffRow",
    "Verdict",
    "about_differences",
    "compared",
    "definitions",
    "diff",
    "ranked",
    "step_program",
]

Verdict = Literal["slower", "faster", "not shown", "not known"]

MIN_CHANGE: Final = 0.02  # minimum change of a labelled row, as a share of its time before
_CONFIDENCE: Final = 0.95  # confidence level of the intervals
_FALSE_SHARE: Final = 0.01  # false discovery rate of the labelled rows
_MATTERS: Final = 0.001  # minimum change of a labelled row, as a share of the busy time


@dataclass(frozen=True)
class DiffRow:
    """Time of a group of operations per step, before and after.

    Attributes:
      name: name of the operation (both names if it changed) or of the group; "(irregular)" for the time of the steps
        beyond the trimmed means of the other rows.
      before_s, after_s: seconds of self time per step, trimmed means.
      change_s: after_s - before_s.
      low_s, high_s: confidence interval of `change_s`; None if unknown.
      change_before_share: change_s / before_s; None for new groups.
      own_change_s: the group's own part of `change_s`: all of it with several captures on both sides, or if the group
        appeared or disappeared; otherwise the part beyond the median change of the other operations, of which at least
        three are needed.
      p: probability of such an own change by chance, corrected for the number of rows (Benjamini and Hochberg).
      verdict: "slower" or "faster" by the own change; "not shown" if it is small or could be chance; "not known" if
        there are too few steps or operations to tell.
      matched: "alike", "moved" to another line, with "other shapes", in an "other form", "appeared" or "disappeared".
      category, layer, line, package_line: labels of the group's heaviest operation.
    """

    name: str
    before_s: float
    after_s: float
    change_s: float
    low_s: float | None
    high_s: float | None
    change_before_share: float | None
    own_change_s: float | None
    p: float | None
    verdict: Verdict = "not known"
    matched: str = ""
    category: str = ""
    layer: str = ""
    line: str = ""
    package_line: str = ""


def diff(
    before: Sequence[Trace], after: Sequence[Trace], *, by: DiffGrouping = "op", min_change: float = MIN_CHANGE
) -> Answer[DiffRow]:
    """Ranks the changes between the steps of captures.

    Args:
      before, after: captures of one program each; several captures show the variation between captures.
      by: grouping of the rows: matched operation, Python line, layer, module or category of work, with the names of the
        program after.
      min_change: minimum change of a labelled row, as a share of its time before.

    Raises:
      ProfileError: a side lacks captures.
    """
    comparison, notes = compared(before, after)
    if comparison is None:
        return Answer(f"diff by {by}", {}, DiffRow, (), notes)
    return ranked(comparison, notes, by=by, min_change=min_change)[0]


def compared(before: Sequence[Trace], after: Sequence[Trace]) -> tuple[Comparison | None, tuple[str, ...]]:
    """Compares captures of one program each.

    Returns:
      The comparison, None if the steps of a side are unknown; and notes on differences of the machines or programs, and
      on incomplete traces.

    Raises:
      ProfileError: a side lacks captures.
    """
    first, second = Side.of(before), Side.of(after)
    # Captures of a side are of one program, so the first stands for all.
    notes = (*definitions(before[0], after[0]), *(each for trace in (*before, *after) for each in trace.problems))
    if first is None or second is None:
        missing = "Steps are unknown: a trace has no operations, or its events identify no executions of a program."
        return None, (missing, *notes)
    return Comparison.of(first, second), notes


def ranked(
    comparison: Comparison, notes: Sequence[str] = (), *, by: DiffGrouping = "op", min_change: float = MIN_CHANGE
) -> tuple[Answer[DiffRow], tuple[Group | None, ...]]:
    """Returns the answer of `diff` and the group of operations of each row, None for the row of the remaining time."""
    groups = comparison.groups(by)
    rows = zip(_rows(comparison, groups, by, min_change), (*groups, None), strict=True)
    found = sorted(rows, key=lambda each: _rank(each[0]))
    answer = Answer(
        name=f"diff by {by}",
        facts=_totals(comparison),
        row_type=DiffRow,
        rows=tuple(row for row, _ in found),
        notes=(*_notes(comparison, min_change), *notes),
    )
    return answer, tuple(group for _, group in found)


def _rows(comparison: Comparison, groups: Sequence[Group], by: DiffGrouping, min_change: float) -> Iterator[DiffRow]:
    found = grouped_difference(*comparison.sides, groups, trim=TRIM)
    own, p = comparison.net_changes(found, groups)
    rest = comparison.rest(found)
    # The last row, the rest of the time, cannot be compared with peers.
    own, p = (np.append(column, np.nan) for column in (own, p))
    if rest.of_captures:  # with one capture on a side, stalls cannot be attributed to the program
        own[-1], p[-1] = rest.change[0], rest.p()[0]
    found = found.appended(rest)
    low, high = found.interval(_CONFIDENCE)
    # Relative to the row and to the step, because a large share of a tiny row does not matter.
    least_s = np.maximum(min_change * found.before, _MATTERS * comparison.busy.before)
    named = [_describe(comparison, group, by) for group in groups]
    named.append((_IRREGULAR, {}))
    for column, (name, about) in enumerate(named):
        before_s, change_s, own_s = float(found.before[column]), float(found.change[column]), _known(own[column])
        yield DiffRow(
            name=name,
            before_s=before_s,
            after_s=float(found.after[column]),
            change_s=change_s,
            low_s=_known(low[column]),
            high_s=_known(high[column]),
            change_before_share=change_s / before_s if before_s > 0 else None,
            own_change_s=own_s,
            p=_known(p[column]),
            verdict=_judge(change_s, own_s, _known(p[column]), min_s=float(least_s[column])),
            **about,
        )


def _describe(comparison: Comparison, group: Group, by: DiffGrouping) -> tuple[str, dict[str, str]]:
    """Returns the name of a row and its labels."""
    place = Place.of(comparison, group)
    names = ("category", "layer", "line", "package_line")
    about = {"matched": group.matched, **{name: getattr(place, name) for name in names}}
    return getattr(place, by), about


_IRREGULAR: Final = "(irregular)"


def _judge(change_s: float, net_s: float | None, p: float | None, *, min_s: float) -> Verdict:
    if net_s is None or p is None:
        return "not known"
    if p > _FALSE_SHARE or min(abs(change_s), abs(net_s)) < min_s:
        return "not shown"
    return "slower" if net_s > 0 else "faster"


def _rank(row: DiffRow) -> tuple[bool, bool, float]:
    """Sort key: labelled rows first, then by the size of the change."""
    changed_s = row.change_s if row.own_change_s is None else row.own_change_s
    return row.verdict not in ("slower", "faster"), row.own_change_s is None, -abs(changed_s)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _totals(comparison: Comparison) -> dict[str, Any]:
    step, busy = comparison.step, comparison.busy
    means = grouped_difference(*comparison.sides, comparison.pairs)
    low, high = (_known(end[0]) for end in step.interval(_CONFIDENCE))
    peers = comparison.each.at(comparison.peers)
    lined = np.array([bool(Place.of(comparison, pair).line) for pair in comparison.pairs], bool)
    both = np.array([bool(pair.before and pair.after) for pair in comparison.pairs], bool)
    return {
        "steps": [sum(map(len, side.step_s)) for side in comparison.sides],
        "captures": [len(side.step_s) for side in comparison.sides],
        "before_step_s": float(step.before[0]),
        "after_step_s": float(step.after[0]),
        "step_change_s": float(step.change[0]),
        "step_change_low_s": low,
        "step_change_high_s": high,
        "before_busy_s": float(busy.before[0]),
        "after_busy_s": float(busy.after[0]),
        "busy_change_s": float(busy.change[0]),
        "idle_change_s": float(step.change[0] - busy.change[0]),
        "matched_change_s": float(means.change[both].sum()),
        "appeared_s": float(means.after[~both].sum()),
        "disappeared_s": float(means.before[~both].sum()),
        "attributed_change_s": float(means.change[lined].sum()),
        "unattributed_change_s": float(means.change[~lined].sum()),
        "median_change_before_share": float(np.median(peers.change / peers.before)) if len(peers.before) else None,
    }


def _notes(comparison: Comparison, min_change: float) -> Iterator[str]:
    yield (
        "Seconds are those of a step on an average device. Rows are named from a change of "
        f"{number('_share', min_change)} of their time and {number('_share', _MATTERS)} of the busy time on, so that "
        f"{number('_share', _FALSE_SHARE)} of those named are so by chance."
    )
    if not comparison.step.of_captures:
        yield (
            "A side has one capture, so intervals omit the variation between captures, and rows are labelled by their "
            "change relative to the median of the other operations. That median changes with the machine or with the "
            "program as a whole; several captures per side, taken alternately, distinguish them."
        )
    if np.isnan(comparison.step.error).any():
        yield "A side has one step: the variation of steps, and thus the significance of changes, is unknown."
    if all(pair.matched == "alike" for pair in comparison.pairs):
        yield "Both ran the same operations: differences come from the machine, its libraries, or the data."
    outside_s = [side.outside_s for side in comparison.sides]
    if max(outside_s) > 0:
        yield (
            f"Busy time outside of steps, in no row: {number('_s', outside_s[0])} before, "
            f"{number('_s', outside_s[1])} after. It includes the last step of a capture, whose end is unknown."
        )


def definitions(before: Trace, after: Trace) -> Iterator[str]:
    """Yields the ways in which two traces are not comparable."""
    for what, *values in (
        ("The programs whose runs are the steps", _step_programs(before), _step_programs(after)),
        ("The numbers of devices", len(before.devices), len(after.devices)),
    ):
        if values[0] != values[1]:
            yield f"{what} differ: {values[0]} before, {values[1]} after."
    yield from about_differences(before.about, after.about)
    programs = [program for trace in (before, after) if (program := step_program(trace)) is not None]
    for argument in argument_differences(programs):
        yield f"The step's arguments differ: {argument}."


def about_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences in hardware and JAX version that both sides record."""
    for key, what in _ABOUT.items():
        if key in before and key in after and before[key] != after[key]:
            yield f"{what} differ: {before[key]} before, {after[key]} after."


_ABOUT: Final = {
    "device_kind": "The chips",
    "cpu": "The CPUs",
    "cores": "The numbers of cores",
    "jax": "The versions of JAX",
}


def _step_programs(trace: Trace) -> str:
    return ", ".join(sorted({step.program for steps in trace.steps.values() for step in steps}))


def step_program(trace: Trace) -> Program | None:
    """Returns the program whose runs are the steps of the first device with steps; None without its HLO."""
    for ops in trace.devices:
        names = {step.program for step in trace.steps[ops.device]}
        took = [(self_s, operation.program) for operation, self_s, _ in ops.totals() if operation.module in names]
        if took:
            return max(took, key=lambda entry: entry[0])[1]
    return None
