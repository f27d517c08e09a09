"""`stack profile report`: every analysis of a trace in one HTML file."""

import json as json_format
import sys
from pathlib import Path

from stack_profile.commands.printing import PageEvents, PageLimit, PrintJson, TracePath

__all__ = ["report"]


def report(
    trace: TracePath,
    /,
    *,
    out: Path = Path("report.html"),
    limit: PageLimit = 200,
    json: PrintJson = False,
    events: PageEvents = 1_000_000,
) -> None:
    """Write a timeline and every analysis, with its defaults, into one HTML file that needs no network.

    Args:
      out: file to write.
    """
    from stack_profile.exports import write
    from stack_profile.report.page import page, sections
    from stack_profile.traces.trace import load_trace

    loaded = load_trace(trace)
    found = list(sections(loaded))
    write([page(loaded, found, limit=limit, events=events)], out)
    if json:
        failures = {section.name: section.failure for section in found if section.answer is None}
        print(json_format.dumps({"report": str(out), "bytes": out.stat().st_size, "failures": failures}, indent=2))
    for section in found:
        if section.answer is None:
            print(f"stack: analysis {section.name!r} failed: {section.failure}", file=sys.stderr)
    print(f"stack: the report is {str(out)!r}.", file=sys.stderr)
