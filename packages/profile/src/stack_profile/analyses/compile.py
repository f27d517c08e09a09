"""Compilations: which functions were compiled, how often, how long it took, and why.

JAX compiles a function again when a shape, dtype, layout or static value of its arguments is new. The reason is found
by comparing the programs in the trace, the times come from compilation events on the host.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stack_core.report.plots import bars
from stack_profile.answer import Answer
from stack_profile.traces.hlo import Program
from stack_profile.traces.operations import PICOSECOND, HostEvents
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.programs.hlo import ArrayShape

__all__ = ["CompileRow", "argument_differences", "compilation_events", "compilations"]

_COMPILE: Final = "backend_compile"  # JAX's event around compiling a module with XLA or loading it from the disk cache
_CALL: Final = re.compile(r"PjitFunction\((?:jit\()?([^()]+)\)*")


@dataclass(frozen=True)
class CompileRow:
    """The programs of one function.

    Attributes:
      name: module name, such as "jit_step" for a function `step`.
      programs: number of loaded programs of that name.
      compilations: number of compilations during the capture; None without host events, which record compilations.
      compile_s: their total time; None like `compilations`.
      why: differences between the programs' arguments and results; empty for a single program.
    """

    name: str
    programs: int
    compilations: int | None
    compile_s: float | None
    why: str


def compilations(trace: Trace) -> Answer[CompileRow]:
    """Show what was compiled, how often, how long it took, and why again."""
    groups: dict[str, list[Program]] = {}
    for program in trace.programs:
        groups.setdefault(program.name, []).append(program)
    took = _events(trace.host_events)
    # Without events of the host, 0 compilations would be a guess.
    known = len(trace.host_events.which) > 0
    names = {*groups, *took}
    rows = [
        CompileRow(
            name=name,
            programs=len(groups.get(name, ())),
            compilations=len(took.get(name, ())) if known else None,
            compile_s=sum(took.get(name, ()), 0.0) if known else None,
            why="; ".join(argument_differences(sorted(groups.get(name, ()), key=lambda each: each.key))),
        )
        for name in names
    ]
    shown = tuple(sorted(rows, key=lambda row: (-(row.compile_s or 0.0), -row.programs, row.name)))
    return Answer(
        name="compile",
        facts={
            "functions": len(groups),
            "programs": len(trace.programs),
            "compilations": sum(map(len, took.values())) if known else None,
            "compile_s": sum(map(sum, took.values()), 0.0) if known else None,
        },
        row_type=CompileRow,
        rows=shown,
        notes=(*_notes(rows), *trace.problems),
        plots=(bars("Time to compile, by function", shown, "compile_s"),) if any(row.compile_s for row in rows) else (),
    )


def _notes(rows: Sequence[CompileRow]) -> Iterator[str]:
    if not rows:
        yield "No data: the trace has no program, and nothing was compiled during the capture."
        return
    yield "Programs that were loaded, and compilations that took place, during the capture."
    if rows[0].compilations is None:
        yield "The trace has no events of the host: the number of compilations is unknown."
    if any(row.programs > 1 and not row.why for row in rows):
        yield (
            "Programs without a reason have equal arguments: their functions share a name, a static argument or a "
            "closed-over value differs, or jax.jit was called again."
        )


def _events(host: HostEvents) -> Mapping[str, list[float]]:
    """Collects the seconds of each compilation by module name; "" if the function is not known."""
    found: dict[str, list[float]] = {}
    for name, start_ps, end_ps in compilation_events(host):
        found.setdefault(name, []).append(float(end_ps - start_ps) * PICOSECOND)
    return found


def compilation_events(host: HostEvents) -> Iterator[tuple[str, int, int]]:
    """Yields module name, start and end in picoseconds of each compilation; "" if the function is not known."""
    kinds = np.array([name.startswith(_COMPILE) for name in host.names], bool)
    calls = {row: match[1] for row, name in enumerate(host.names) if (match := _CALL.match(name))}
    of_calls = np.flatnonzero(np.isin(host.which, list(calls)))
    for row in np.flatnonzero(kinds[host.which]) if len(host.names) else ():
        # Compilation events do not name their function, but they lie inside its call.
        around = of_calls[(host.start_ps[of_calls] <= host.start_ps[row]) & (host.end_ps[of_calls] >= host.end_ps[row])]
        # Calls may nest, and the latest start is the innermost.
        innermost = around[np.argmax(host.start_ps[around])] if len(around) else None
        name = "" if innermost is None else _module_name(calls[int(host.which[innermost])])
        yield name, int(host.start_ps[row]), int(host.end_ps[row])


def _module_name(function: str) -> str:
    """Returns JAX's module name for a jitted function."""
    # As in JAX, which replaces other characters of the name by underscores.
    return re.sub(r"[^\w.-]", "_", f"jit({function})").rstrip("_")


def argument_differences(programs: Sequence[Program]) -> Iterator[str]:
    """Yields each argument, and the result, that differs between the programs: "x: f32[8,4], f32[9,4]"."""
    if len(programs) < 2:
        return
    arguments = [_arguments(program) for program in programs]
    for name in dict.fromkeys(name for each in arguments for name in each):
        kinds = dict.fromkeys(each.get(name, "absent") for each in arguments)
        if len(kinds) > 1:
            yield f"{name}: {', '.join(kinds)}"


def _arguments(program: Program) -> dict[str, str]:
    """Returns the type of each argument by name, and of the result."""
    if program.module is None:
        return {}
    entry = program.module.entry
    found = {}
    for place, parameter in enumerate(entry.parameters):
        instruction = program.instructions.get(parameter.name)
        name = instruction.argument if instruction and instruction.argument else f"argument {place}"
        found[name] = _types(parameter.shapes)
    return {**found, "result": _types(entry.root.shapes)}


def _types(shapes: "Iterable[ArrayShape]") -> str:
    return " ".join(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in shapes)
