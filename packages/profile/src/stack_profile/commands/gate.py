"""`stack profile gate`: fails where a program became slower or larger than its baseline."""

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from cyclopts import Parameter

from stack_core.abi.errors import nearest
from stack_core.commands.named_function import named_function
from stack_core.report.fields import number
from stack_profile.answer import Answer, share_of
from stack_profile.commands.diff import More, write_report
from stack_profile.commands.printing import PrintJson
from stack_profile.comparisons.costs import Costs, compiled_costs
from stack_profile.comparisons.gate import ALLOWED, CONFIDENCE, GateRow, GateSide, Metric
from stack_profile.comparisons.gate import gate as compared
from stack_profile.errors import ProfileError
from stack_profile.traces.trace import load_trace

__all__ = ["gate"]

_REGRESSED: Final = 1


def gate(  # noqa: PLR0913, each parameter is an option of the command
    base: str,
    new: str,
    /,
    *,
    a: More = (),
    b: More = (),
    metric: Annotated[tuple[Metric, ...], Parameter(negative=(), consume_multiple=True)] = (),
    max_regression: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (),
    undecided: Literal["fail", "pass"] = "fail",
    compilations: int | None = None,
    json: PrintJson = False,
    report: Path | None = None,
) -> None:
    """Fail if a program became slower or larger: stack profile gate BASE NEW --max-regression 3% memory=1%

    Each side is a capture or a file of `stack profile costs --out`. NEW may also be a function FILE.py:fn, which is
    compiled and not run. Exits with 1 after a regression and names the lines at fault; exits with 2 after an error. If
    the times are undecided, exits with 1 too, except with --undecided pass: take more steps, or several captures per
    side.

    Args:
      a: more captures of the baseline.
      b: more captures of the new program.
      metric: metrics to compare, by default all metrics known for both sides.
      max_regression: allowed increase of all metrics except compile_time, or of a named one, as in compile_time=50%. By
        default 3%, and 25% for compile_time, which varies more.
      undecided: result of the gate for undecided changes.
      compilations: number of compilations of FILE.py:fn (3).
      report: file for an HTML page with the metrics, the changes by line and both timelines; both sides are captures.
    """
    allowed = {**ALLOWED, **_allowed(max_regression)}
    if _is_function(base):
        # Both files in one process would share the modules that the first one imported.
        raise ProfileError(f"{base!r} cannot be the baseline. Keep its costs: stack profile costs {base} --out FILE.")
    if compilations is not None and not _is_function(new):
        raise ProfileError(
            f"--compilations is for a function FILE.py:fn, and {new!r} is already measured. Leave it out."
        )
    count = 3 if compilations is None else compilations
    sides = (_side(base, a, count), _side(new, b, count))
    if report is not None and not all(side.traces for side in sides):
        raise ProfileError("--report needs captures on both sides: costs have no steps to compare by line.")
    answer = compared(*sides, metrics=metric, allowed=allowed)
    if json:
        print(json_format.dumps(answer.as_mapping(), indent=2))
    else:
        _print(answer)
    if report is not None:
        write_report(report, *(side.traces for side in sides), gate=answer)
    if answer.facts["regressed"] or (undecided == "fail" and answer.facts["undecided"]):
        sys.exit(_REGRESSED)


def _allowed(texts: Sequence[str]) -> dict[Metric, float]:
    """Parses allowed increases, in any order: "3%" for all metrics except compile_time, "memory=1%" for one."""
    everywhere: dict[Metric, float] = {}
    named: dict[Metric, float] = {}
    for text in texts:
        name, equals, share = text.partition("=")
        if not equals:
            everywhere = {metric: share_of(text) for metric in ALLOWED if metric != "compile_time"}
            continue
        found = [metric for metric in ALLOWED if metric == name]
        if not found:
            raise ProfileError(
                f"{text!r} names no metric.{nearest(name, ALLOWED)} Metrics are {', '.join(get_args(Metric))}."
            )
        named[found[0]] = share_of(share)
    return {**everywhere, **named}


def _is_function(text: str) -> bool:
    return ":" in text and not Path(text).exists()


def _side(place: str, more: Sequence[Path], compilations: int) -> GateSide:
    if _is_function(place) or place.endswith(".json"):
        if more:
            raise ProfileError(
                f"{place!r} is not a capture, so it cannot be combined with {', '.join(map(str, more))}. Leave out "
                "--a and --b, or name captures only."
            )
        if place.endswith(".json"):
            return GateSide.of_costs(Costs.read(Path(place)))
        fn, arguments = named_function(place)
        return GateSide.of_costs(compiled_costs(fn, *arguments, compilations=compilations))
    return GateSide.of_traces([load_trace(path) for path in (Path(place), *more)])


def _print(answer: Answer[GateRow]) -> None:
    for row in answer.rows:
        base, now = (number(f"_{row.unit}", value) for value in (row.base, row.new))
        change = "from nothing" if row.change_base_share is None else f"{row.change_base_share:+.2%}"
        print(f"{row.metric}: {base} -> {now}, {change}{_interval(row)}; allowed {row.allowed_base_share:+.2%}")
        print(f"  {row.verdict}{_REMEDIES[row.metric] if row.verdict == 'undecided' else ''}")
        for fault in row.at_fault:
            print(f"  {fault}")
    for note in answer.notes:
        print(f"note: {note}")


_REMEDIES: Final = {
    "step_time": ": the steps vary too much. Record more steps, or several captures per side (--a, --b)",
    "compile_time": ": the compilations vary too much. Raise --compilations",
}


def _interval(row: GateRow) -> str:
    if row.metric not in _REMEDIES:
        return ""
    if row.low_base_share is None or row.high_base_share is None:
        return ", variation unknown"
    return f", {CONFIDENCE:.0%} interval {row.low_base_share:+.2%} to {row.high_base_share:+.2%}"
