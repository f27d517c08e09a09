"""Exports of a trace for other tools: Perfetto, speedscope, flame graphs, spreadsheets, Graphviz."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from stack_profile.analyses.graph import dot as graph_dot
from stack_profile.analyses.graph import graph
from stack_profile.analyses.ops import ops
from stack_profile.errors import ProfileError
from stack_profile.perfetto import perfetto
from stack_profile.traces.operations import Ops
from stack_profile.traces.trace import Trace

__all__ = ["EXPORTS", "csv", "dot", "folded", "speedscope", "write"]

_NANOSECOND_S: Final = 1e-9


def folded(trace: Trace) -> Iterator[str]:
    """Yields one line per stack, "outermost;...;innermost;operation NANOSECONDS" of self time, for flamegraph.pl."""
    for stack, self_s in _stacks(trace.devices).items():
        # flamegraph.pl takes integers, so shorter stacks vanish.
        if nanoseconds := round(self_s / _NANOSECOND_S):
            # A semicolon separates frames.
            yield f"{';'.join(part.replace(';', ',') for part in stack)} {nanoseconds}\n"


def speedscope(trace: Trace) -> Iterator[str]:
    """Yields a JSON profile for https://www.speedscope.app: per device, self time by Python stack and operation."""
    frames: dict[str, int] = {}
    profiles = []
    for each in trace.devices:
        stacks = _stacks([each])
        profiles.append({
            "type": "sampled",
            "name": each.device,
            "unit": "seconds",
            "startValue": 0,
            "endValue": sum(stacks.values()),
            "samples": [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks],
            "weights": list(stacks.values()),
        })  # fmt: skip
    yield json.dumps({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": trace.source,
        "exporter": "stack-profile",
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": profiles,
    })  # fmt: skip


def csv(trace: Trace) -> Iterator[str]:
    """Yields one CSV row per operation, as in the analysis `ops`."""
    yield from ops(trace, by="op").as_csv()


def write(parts: Iterable[str] | Iterable[bytes], path: Path) -> None:
    """Writes texts or bytes to a file atomically, by renaming a temporary file.

    Raises:
      ProfileError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        partial.replace(path)
    except OSError as error:
        raise ProfileError(f"{str(path)!r} cannot be written: {error}. Name another file.") from error
    finally:
        partial.unlink(missing_ok=True)


def dot(trace: Trace) -> Iterator[str]:
    """Yields the neighbourhood of the heaviest operation as a Graphviz graph, from the analysis `graph`."""
    yield from graph_dot(graph(trace))


EXPORTS: Final[Mapping[str, Callable[[Trace], Iterable[str] | Iterable[bytes]]]] = {
    "perfetto": perfetto,
    "speedscope": speedscope,
    "folded": folded,
    "csv": csv,
    "dot": dot,
}


def _stacks(devices: Iterable[Ops]) -> dict[tuple[str, ...], float]:
    """Returns seconds of self time by Python stack, outermost first, and operation."""
    found: dict[tuple[str, ...], float] = {}
    for each in devices:
        for operation, self_s, _ in each.totals():
            frames = operation.instruction.frames if operation.instruction else ()
            stack = (*(f"{frame.function} ({frame})" for frame in reversed(frames)), operation.name)
            found[stack] = found.get(stack, 0.0) + self_s
    return found
