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
      table: file of the tuned table, if one was written.
      profile: page of the profile, if one was captured.
      missing: parts that were not reached or that failed, one line each.
    """

    heading: str
    contracts: list[Contract] = field(default_factory=list)
    speeds: Results | None = None
    table: Path | None = None
    profile: Path | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Failed checks of the contracts."""
        return [
            f"{contract.op}/{contract.implementation}: {problem}"
            for contract in self.contracts
            for problem in contract.problems
        ]


def markdown(found: BurnInResults) -> str:
    """Returns the page."""
    lines = [f"# Burn-in: {found.heading}", "", "## Contracts, against float64", ""]
    names = ("passed", "refused", "failed", "died")
    lines += _table(
        ["implementation", *names],
        [
            [f"`{each.op}/{each.implementation}`", *(str(each.outcomes[name]) for name in names)]
            for each in found.contracts
        ],
    )
    for each in found.contracts:
        shown = each.problems[:_MAX_PROBLEMS]
        lines += ["", *(f"- `{each.op}/{each.implementation}` {problem}" for problem in shown)] if shown else []
        if len(each.problems) > len(shown):
            lines.append(f"- and {len(each.problems) - len(shown)} more of `{each.op}/{each.implementation}`")
    lines += ["", "## Speeds, in turns with the reference", "", *_speeds(found.speeds)]
    lines += ["", "## Files", ""]
    lines.append(f"- tuned table: {found.table.name if found.table else 'none'}")
    lines.append(f"- profile: {found.profile.name if found.profile else 'none'}")
    if found.missing:
        lines += ["", "## Not reached", "", *(f"- {each}" for each in found.missing)]
    return "\n".join(lines) + "\n"


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
