"""The results of a burn-in as a Markdown page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stack_kernels.bench.results import Results
from stack_kernels.burn_in.contracts import Contract

__all__ = ["BurnInResults", "markdown"]

_MAX_PROBLEMS = 8


@dataclass
class BurnInResults:
    """Results of the stages.

    Attributes:
      heading: date, chip and versions.
      contracts: results of the contract checks, by implementation.
      speeds: measured calls; None if nothing was measured.
      tuned: tuned calls, as (call, choice before, choice now).
      table: file of the tuned table, if one was written.
      profile: page of the profile, if one was captured.
      failures: calls and stages that failed, one line each.
      not_reached: calls and stages without a result because of the time, one line each.
      not_applicable: calls that an implementation refuses or that have nothing to choose, one line each.
    """

    heading: str
    contracts: list[Contract] = field(default_factory=list)
    speeds: Results | None = None
    tuned: list[tuple[str, str, str]] = field(default_factory=list)
    table: Path | None = None
    profile: Path | None = None
    failures: list[str] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    not_applicable: list[str] = field(default_factory=list)

    @property
    def defects(self) -> list[str]:
        """Everything that makes the burn-in fail: failed, not tested and not reached, one line each."""
        return [
            *(f"failed: {each.name} {problem}" for each in self.contracts for problem in each.problems),
            *(f"failed: {failure}" for failure in self.failures),
            *(f"not tested: {each.name}, {each.untested_reason}" for each in self._untested),
            *(f"not reached: {each}" for each in self.not_reached),
        ]

    @property
    def _untested(self) -> list[Contract]:
        return [each for each in self.contracts if each.status == "not tested"]

    @property
    def summary(self) -> str:
        """One line with the numbers of implementations by status, and of the calls without a result."""
        statuses = [each.status for each in self.contracts]
        counts = ", ".join(f"{statuses.count(name)} {name}" for name in ("passed", "failed", "not tested"))
        return f"implementations: {counts}; failed: {len(self.failures)}; not reached: {len(self.not_reached)}"


def markdown(found: BurnInResults) -> str:
    """Returns the page."""
    lines = [f"# Burn-in: {found.heading}", "", f"{found.summary.capitalize()}.", ""]
    lines += ["## Contracts, against float64", "", *_contracts(found.contracts)]
    lines += ["", "## Speeds, in turns with the reference", "", *_speeds(found.speeds)]
    if found.tuned:
        lines += ["", "## Tuned calls", "", *_table(["call", "before", "now"], found.tuned)]
    lines += ["", "## Files", ""]
    lines.append(f"- tuned table: {found.table.name if found.table else 'none'}")
    lines.append(f"- profile: {found.profile.name if found.profile else 'none'}")
    for title, entries in (
        ("Failed", found.failures),
        ("Not reached", found.not_reached),
        ("Not applicable", found.not_applicable),
    ):
        if entries:
            lines += ["", f"## {title}", "", *(f"- {each}" for each in entries)]
    return "\n".join(lines) + "\n"


def _contracts(contracts: Sequence[Contract]) -> list[str]:
    names = ("passed", "refused", "failed", "died")
    lines = _table(
        ["implementation", "status", *names, "not reached"],
        [
            [f"`{each.name}`", each.status, *(str(each.outcomes[name]) for name in names), str(each.not_reached)]
            for each in contracts
        ],
    )
    for each in contracts:
        shown = each.problems[:_MAX_PROBLEMS]
        details = [f"- `{each.name}` {problem}" for problem in shown]
        if len(each.problems) > len(shown):
            details.append(f"- and {len(each.problems) - len(shown)} more of `{each.name}`")
        if each.status == "not tested":
            details.append(f"- `{each.name}` is not tested: {each.untested_reason}")
        lines += ["", *details] if details else []
    return lines


def _speeds(results: Results | None) -> list[str]:
    if results is None or not results.rows:
        return ["Nothing was measured."]
    rows = [
        [
            f"{row.op} {row.case}",
            row.direction,
            row.asked or "chosen",
            row.ran,
            f"{row.timing.median_s * 1e3:.3g} ms",
            f"{row.timing.spread:.0%}",
            f"{row.ratio:.2f}",
            "" if row.roofline_share is None else f"{row.roofline_share:.0%} of {row.denominator}",
        ]
        for row in results.rows
    ]
    headings = ["call", "pass", "asked", "ran", "median", "spread", "over reference", "share of roofline"]
    return [f"{results.heading}. Peaks: {results.provenance}.", "", *_table(headings, rows)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]
