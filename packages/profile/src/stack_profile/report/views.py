"""Data of the page's views besides events: the chip's peaks, memory, graphs of programs, advice, and notes.

The page shows the error message of a part that fails and all other parts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stack_profile.analyses.advice import advice
from stack_profile.analyses.communication import communication, link_bytes_s
from stack_profile.analyses.compile import compilations
from stack_profile.analyses.graph import nodes_of
from stack_profile.analyses.input_pipeline import input_pipeline, input_processes
from stack_profile.analyses.memory import MomentRow, memory_of, schedule_of
from stack_profile.analyses.roofline import roof_of
from stack_profile.report.encoding import pack
from stack_profile.report.lanes import host_group
from stack_profile.report.links import Links
from stack_profile.traces.allocator import allocator_histories
from stack_profile.traces.short_paths import ShortPaths
from stack_profile.traces.trace import Trace

__all__ = ["views"]

_MOST_MOMENTS: Final = 20_000
_MOST_NODES: Final = 40_000


def views(trace: Trace, paths: ShortPaths, links: Links) -> dict[str, Any]:
    """Returns the tables of the views by name, and under "failures" the error messages of the missing ones."""
    parts: Mapping[str, Callable[[Trace, ShortPaths], Any]] = {
        "roof": _roof,
        "memory": _memory,
        "allocators": _allocators,
        "graphs": _graphs,
        "compile": _compile,
        "communication": _communication,
        "input": _input,
        "advice": lambda trace, paths: _advice(trace, paths, links),
    }
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, part in parts.items():
        try:
            found[name] = part(trace, paths)
        except Exception as error:  # A damaged trace may raise anything; only this view is omitted.
            failures[name] = f"{type(error).__name__}: {error}"
    return {**found, "failures": failures}


def _roof(trace: Trace, paths: ShortPaths) -> dict[str, Any]:
    roof = roof_of(trace)
    chip = roof.chip
    return {
        "chip": chip.kind if chip else None,
        "note": roof.note,
        # One device's part of the peaks, to compare with the rate of an operation on one device.
        "flops_s": {dtype: peak / roof.sharing for dtype, peak in chip.peak_flops.items()} if chip else {},
        "bytes_s": (chip.hbm_bandwidth_bytes_s or 0.0) / roof.sharing if chip else None,
    }


def _memory(trace: Trace, paths: ShortPaths) -> list[dict[str, Any]]:
    """Returns the arrays at the peak and the schedule of each program that ran; of equal names, the largest program."""
    ran = {operation.module for each in trace.devices for operation in each.operations}
    # Captures of a full memory may have programs without events.
    shown = (each for each in trace.programs if each.name in ran or not trace.devices)
    by_size = sorted(shown, key=lambda each: len(each.proto))
    found = []
    for program in {program.name: program for program in by_size}.values():
        answer = memory_of(program)
        if not answer.rows:
            continue
        moments, peak_at = _thinned(schedule_of(program).rows)
        found.append(
            {
                "program": program.name,
                "facts": answer.facts,
                "notes": [paths.text(note) for note in answer.notes],
                "rows": [[row.name, row.kind, row.size_bytes, row.layer, paths.text(row.line)] for row in answer.rows],
                "moments": [[row.position, row.instruction, row.live_bytes, paths.text(row.line)] for row in moments],
                "peak_at": peak_at,
            }
        )
    # As in the analysis: if no program ran, the one with the most memory first.
    return sorted(found, key=lambda each: -each["facts"]["total_bytes"])


def _thinned(rows: Sequence[MomentRow]) -> tuple[Sequence[MomentRow], int]:
    """Returns at most `_MOST_MOMENTS` rows, of each part of the schedule the highest, and the index of the peak."""
    size = -(-len(rows) // _MOST_MOMENTS)
    parts = (rows[first : first + size] for first in range(0, len(rows), size or 1))
    kept = [max(part, key=lambda row: row.live_bytes) for part in parts]
    return kept, max(range(len(kept)), key=lambda place: kept[place].live_bytes, default=-1)


def _advice(trace: Trace, paths: ShortPaths, links: Links) -> dict[str, Any]:
    answer = advice(trace)
    rows = [
        {
            **dataclasses.asdict(row),
            "evidence": paths.text(row.evidence),
            "line": paths.text(row.line),
            "address": links.address(row, answer.facts),
        }
        for row in answer.rows
    ]
    return {"rows": rows, "notes": [paths.text(note) for note in answer.notes]}


def _graphs(trace: Trace, paths: ShortPaths) -> list[dict[str, Any]]:
    """Returns the instructions of each program that ran, up to `_MOST_NODES` of all of them."""
    found: dict[str, dict[str, Any]] = {}
    left = _MOST_NODES
    for program in sorted(trace.ran, key=lambda each: -len(each.proto)):
        if program.name in found:
            continue
        rows = list(nodes_of(program))
        if not rows or len(rows) > left:
            continue
        left -= len(rows)
        places = {row.name: place for place, (row, _) in enumerate(rows)}
        nodes = [
            [
                row.name,
                row.opcode,
                row.shape,
                row.result_bytes,
                row.flops,
                row.traffic_bytes,
                paths.text(row.line),
                places.get(row.fusion, -1),
                [places[name] for name in row.operands if name in places],
                [places[name] for name in users if name in places],
            ]
            for row, users in rows
        ]
        found[program.name] = {"program": program.name, "nodes": nodes}
    return list(found.values())


def _compile(trace: Trace, paths: ShortPaths) -> dict[str, Any]:
    answer = compilations(trace)
    rows = [[row.name, row.programs, row.why, row.compilations is not None] for row in answer.rows]
    return {"rows": rows, "notes": answer.notes}


def _communication(trace: Trace, paths: ShortPaths) -> dict[str, Any]:
    answer = communication(trace)
    return {"link_bytes_s": link_bytes_s(trace, None), "notes": [paths.text(note) for note in answer.notes]}


def _input(trace: Trace, paths: ShortPaths) -> dict[str, Any]:
    """Returns the time of each process's steps, of which the view's shares are."""
    processes = [
        {"group": host_group(trace, each.prefix), "start": each.start_ps, "end": each.end_ps}
        for each in input_processes(trace, trace.devices)
    ]
    return {"processes": processes, "notes": input_pipeline(trace).notes}


def _allocators(trace: Trace, paths: ShortPaths) -> list[dict[str, Any]]:
    return [
        {
            "device": each.device,
            "name": each.allocator,
            "history": pack(
                {
                    "time": each.time_ps.astype(np.int64),
                    "allocated": each.allocated_bytes.astype(np.int64),
                    "available": each.available_bytes.astype(np.int64),
                    "peak": each.peak_bytes.astype(np.int64),
                }
            ),
        }
        for each in allocator_histories(trace.spaces, trace.base_ns)
    ]
