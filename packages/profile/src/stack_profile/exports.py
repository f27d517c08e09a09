"""Exports of a trace for other tools: Perfetto, speedscope, flame graphs, spreadsheets, Graphviz."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from stack_profile.analyses.graph import dot as graph_dot
from stack_profile.analyses.graph import graph
from stack_profile.analyses.ops import ops
from stack_profile.errors import ProfileError
from stack_profile.traces.operations import Operation, Ops
from stack_profile.traces.trace import Trace
from stack_profile.traces.xplane import Line, Plane

__all__ = ["EXPORTS", "chrome", "csv", "dot", "folded", "speedscope", "write"]

_MICROSECOND_PS: Final = 1e6
_NANOSECOND_S: Final = 1e-9


def chrome(trace: Trace) -> Iterator[str]:
    """Yields Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

    Each device is a process; its tracks hold operations from start to end of their work, with as many tracks as
    operations run concurrently. Each host is a process with one track per thread. The runtime's bookkeeping events are
    omitted: thread wake-ups, and ends of operations.
    """
    processes = itertools.count(1)
    yield '{"displayTimeUnit": "ns", "traceEvents": [\n'
    lines = itertools.chain(
        itertools.chain.from_iterable(_device_events(next(processes), each) for each in trace.devices),
        itertools.chain.from_iterable(
            _plane_events(next(processes), plane, trace.base_ns)
            for space in trace.spaces
            for plane in space.planes
            # Planes of metadata have tables but not events.
            if any(len(line.events) for line in plane.lines)
        ),
    )
    separator = ""
    # In batches, because a trace has millions of events and each write has a cost.
    while batch := list(itertools.islice(lines, _BATCH)):
        yield separator + ",\n".join(batch)
        separator = ",\n"
    yield "\n]}\n"


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


def write(parts: Iterable[str], path: Path) -> None:
    """Writes a file atomically, by renaming a temporary file.

    Raises:
      ProfileError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        partial.replace(path)
    except OSError as error:
        raise ProfileError(f"{str(path)!r} cannot be written: {error}. Name another file.") from error
    finally:
        partial.unlink(missing_ok=True)


def dot(trace: Trace) -> Iterator[str]:
    """Yields the neighbourhood of the heaviest operation as a Graphviz graph, from the analysis `graph`."""
    yield from graph_dot(graph(trace))


EXPORTS: Final[Mapping[str, Callable[[Trace], Iterable[str]]]] = {
    "perfetto": chrome,
    "speedscope": speedscope,
    "folded": folded,
    "csv": csv,
    "dot": dot,
}

_BOOKKEEPING: Final = ("ThreadpoolListener::", "end: ")
_BATCH: Final = 1 << 14


def _device_events(process: int, each: Ops) -> Iterator[str]:
    yield _named("process_name", process, 0, f"device {each.device}")
    heads = [_head(process, operation.name, _arguments(operation)) for operation in each.operations]
    columns = (
        each.which.tolist(),
        each.tracks.tolist(),
        _microseconds(each.start_ps),
        _microseconds(each.end_ps - each.start_ps),
    )
    for which, lane, start, duration in zip(*columns, strict=True):
        # Only names need escaping, which `_head` has done once per operation.
        yield f'{heads[which]},"tid":{lane},"ts":{start},"dur":{duration}}}'


def _plane_events(process: int, plane: Plane, base_ns: int) -> Iterator[str]:
    yield _named("process_name", process, 0, plane.name)
    shown = {key: name for key, name in plane.event_names.items() if not name.startswith(_BOOKKEEPING)}
    heads = {key: _head(process, name, {}) for key, name in shown.items()}
    for thread, line in enumerate(plane.lines):
        yield _named("thread_name", process, thread, line.name)
        yield from _line_events(thread, line, heads, base_ns)


def _line_events(thread: int, line: Line, heads: Mapping[int, str], base_ns: int) -> Iterator[str]:
    events = line.events
    rows = np.isin(events.metadata, list(heads))
    columns = (
        events.metadata[rows].tolist(),
        _microseconds(events.start_ps(base_ns)[rows]),
        _microseconds(events.duration_ps[rows]),
    )
    for key, start, duration in zip(*columns, strict=True):
        yield f'{heads[key]},"tid":{thread},"ts":{start},"dur":{duration}}}'


def _head(process: int, name: str, arguments: Mapping[str, str]) -> str:
    """Returns the start of the JSON that all events of one name share."""
    shown = f',"args":{json.dumps(arguments)}' if arguments else ""
    return f'{{"ph":"X","pid":{process},"name":{json.dumps(name)}{shown}'


def _named(kind: str, process: int, thread: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


def _microseconds(picoseconds: np.ndarray) -> list[float]:
    # Six decimals of a microsecond are picoseconds.
    return np.round(picoseconds / _MICROSECOND_PS, 6).tolist()


def _arguments(operation: Operation) -> dict[str, str]:
    instruction = operation.instruction
    if instruction is None:
        return {"module": operation.module}
    source = instruction.source()
    known = {
        "module": operation.module,
        "opcode": instruction.opcode,
        "op_name": instruction.op_name,
        "layer": instruction.layer,
        "source": str(source) if source else "",
    }
    return {name: value for name, value in known.items() if value}


def _stacks(devices: Iterable[Ops]) -> dict[tuple[str, ...], float]:
    """Returns seconds of self time by Python stack, outermost first, and operation."""
    found: dict[tuple[str, ...], float] = {}
    for each in devices:
        for operation, self_s, _ in each.totals():
            frames = operation.instruction.frames if operation.instruction else ()
            stack = (*(f"{frame.function} ({frame})" for frame in reversed(frames)), operation.name)
            found[stack] = found.get(stack, 0.0) + self_s
    return found
