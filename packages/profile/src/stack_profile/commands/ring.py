"""`stack profile ring`: lists the captures of the continuous mode, and exports them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_profile.answer import Answer
from stack_profile.captures.processes import SUFFIX, about_of
from stack_profile.captures.ring import Stored, stored_captures, total_bytes
from stack_profile.commands.printing import Limit, PrintCsv, PrintJson, check_formats, show
from stack_profile.errors import TraceError

__all__ = ["RingRow", "ring", "ring_table"]


@dataclass(frozen=True)
class RingRow:
    """A capture of a ring.

    Attributes:
      name: name of its folder.
      kind: "normal", "slow", or "before" for normal steps that are kept with a slow one.
      started_at: when it was saved, ISO 8601 in UTC.
      bytes: size of its files; captures share the files of programs.
      step, duration_s, threshold_s: the slow step, its duration, and the duration above which it is slow.
      partial: reason why the trace is shorter than it should be, or "".
    """

    name: str
    kind: str
    started_at: str
    bytes: int
    step: int | None
    duration_s: float | None
    threshold_s: float | None
    partial: str


def ring(
    directory: Path,
    /,
    *,
    output: Path | None = None,
    limit: Limit = 30,
    json: PrintJson = False,
    csv: PrintCsv = False,
) -> None:
    """List the captures of the continuous mode: of normal steps, and of slow steps with their neighbours.

    Args:
      directory: directory of the ring, such as `profile` in a run's directory.
      output: also write all captures to this file, as one trace for Perfetto.
    """
    check_formats(json=json, csv=csv)
    stored = stored_captures(directory)
    answer = ring_table(directory, stored)
    if output is not None:
        from stack_profile.exports import write
        from stack_profile.perfetto import perfetto
        from stack_profile.traces.trace import load_trace

        write(perfetto(*(load_trace(each.path) for each in stored)), output)
    show(answer, limit=limit, json=json, csv=csv)


def ring_table(directory: Path, stored: Sequence[Stored]) -> Answer[RingRow]:
    """Describes the captures of a ring, the oldest first.

    Raises:
      TraceError: the directory has no captures of a ring.
    """
    if not stored:
        raise TraceError(
            f"{str(directory)!r} has no ring of captures. Name the directory of `stack profile run --continuous`, or "
            "`profile` in the directory of a run with `profile: {continuous: {}}`."
        )
    abouts = [about_of(next(iter(each.path.glob(f"*{SUFFIX}")))) for each in stored]
    figures: Mapping[str, Any] = abouts[-1].get("continuous", {})
    watched_s = figures.get("watched_s")
    facts = {
        "captures": len(stored),
        "slow_steps": sum(each.kind == "slow" for each in stored),
        "total_bytes": total_bytes(stored),
        "ring_mb": figures.get("ring_mb"),
        "watched_s": watched_s,
        "recorded_time_share": figures["recorded_s"] / watched_s if watched_s else None,
        "cost_processor_share": figures["cost_s"] / watched_s if watched_s else None,
    }
    rows = (_row(each, about) for each, about in zip(stored, abouts, strict=True))
    return Answer("ring", facts, RingRow, tuple(rows))


def _row(stored: Stored, about: Mapping[str, Any]) -> RingRow:
    slow: Mapping[str, Any] = about.get("slow_step", {})
    return RingRow(
        stored.path.name,
        stored.kind,
        about.get("started_at", ""),
        sum(stored.files.values()),
        slow.get("step"),
        slow.get("duration_s"),
        slow.get("threshold_s"),
        about.get("partial", ""),
    )
