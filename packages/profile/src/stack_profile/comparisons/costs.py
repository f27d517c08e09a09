"""Static costs of a compiled program: FLOPs, memory and instructions by Python line."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from stack_core.commands.named_function import tracing
from stack_profile.analyses.memory import memory_of
from stack_profile.answer import Answer
from stack_profile.errors import ProfileError
from stack_profile.traces.hlo import Program, program_of

__all__ = ["CostRow", "Costs", "compiled_costs", "costs_of"]


@dataclass(frozen=True)
class CostRow:
    """Costs of the instructions of one line in one layer, in one run of the program.

    Attributes:
      line: "file:line"; empty for instructions without a line.
      function: name of the line's function.
      layer: layer of the instructions, or "".
      flops, traffic_bytes: FLOPs, and bytes read and written.
      memory_bytes: size of the arrays that are live at the peak.
      instructions: number of instructions.
    """

    line: str
    function: str
    layer: str
    flops: int
    traffic_bytes: int
    memory_bytes: int
    instructions: int


@dataclass(frozen=True)
class Costs:
    """Costs of a program on one device, which can be saved to a file.

    Attributes:
      program: name of the module.
      flops, traffic_bytes: totals; None for a program that this version of XLA cannot read.
      memory_bytes: total of arguments, outputs, constants and temporaries; None without XLA's buffer assignment.
      instructions: number of instructions.
      compile_s: seconds of each timed compilation.
      about: version of JAX and the hardware.
      rows: costs by line and layer.
      notes: information that is missing from the numbers.
      format: version of the file format.
    """

    program: str
    flops: int | None
    traffic_bytes: int | None
    memory_bytes: int | None
    instructions: int
    compile_s: tuple[float, ...]
    about: Mapping[str, Any]
    rows: tuple[CostRow, ...]
    notes: tuple[str, ...] = ()
    format: Literal["stack-profile costs 1"] = "stack-profile costs 1"

    def write(self, path: Path) -> None:
        """Writes the costs as JSON.

        Raises:
          ProfileError: the file cannot be written.
        """
        from pydantic import TypeAdapter

        try:
            path.write_bytes(TypeAdapter(Costs).dump_json(self, indent=1) + b"\n")
        except OSError as error:
            raise ProfileError(f"The costs cannot be written: {error}. Name another file.") from error

    @classmethod
    def read(cls, path: Path) -> "Costs":
        """Reads a file that `write` wrote.

        Raises:
          ProfileError: the file does not exist or is not a costs file.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ProfileError(
                f"{str(path)!r} holds no costs of a program: {error} `stack profile costs FILE.py:fn --out FILE` "
                "writes such files."
            ) from error

    def answer(self) -> Answer[CostRow]:
        """Returns the costs as an answer, sorted by FLOPs, then memory."""
        names = ("program", "flops", "traffic_bytes", "memory_bytes", "instructions")
        facts = {name: getattr(self, name) for name in names}
        rows = sorted(self.rows, key=lambda row: (-row.flops, -row.memory_bytes, -row.instructions))
        return Answer("costs", {**facts, "compile_s": list(self.compile_s)}, CostRow, tuple(rows), self.notes)


def compiled_costs(fn: Callable[..., Any], *args: Any, compilations: int = 3) -> Costs:
    """Compiles `fn(*args)`, times the compilation, and reads the program's costs; nothing runs.

    Clears JAX's caches in this process, and does not use the persistent compilation cache.

    Args:
      fn: function to compile, jitted or not.
      args: arrays or `jax.ShapeDtypeStruct`s.
      compilations: number of compilations; their times show the variation.

    Raises:
      ArgumentError: `fn` cannot be traced for the arguments.
      ProfileError: `compilations` is not positive.
      TraceError: the backend does not provide the program.
    """
    import jax

    if compilations < 1:
        raise ProfileError(f"compilations is {compilations}; expected at least 1.")
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    compile_s: list[float] = []
    compiled = None
    cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        jax.jit(lambda: 0).lower().compile()  # warm-up: the first compilation of a process initializes the compiler
        for _ in range(compilations):
            # Otherwise JAX would reuse the program of the previous compilation.
            jax.clear_caches()
            with tracing(fn, args):
                lowered = jitted.lower(*args)
            # After tracing and lowering: the time is XLA's only.
            started_s = time.perf_counter()
            compiled = lowered.compile()
            compile_s.append(time.perf_counter() - started_s)
    finally:
        # The caller's setting, also if the function cannot be compiled.
        jax.config.update("jax_enable_compilation_cache", cached)
    assert compiled is not None, "there is one compilation at least"
    device = jax.devices()[0]
    about = {"jax": jax.__version__, "device_kind": device.device_kind}
    return costs_of(program_of(compiled), compile_s=compile_s, about=about)


def costs_of(program: Program, *, compile_s: Sequence[float] = (), about: Mapping[str, Any] | None = None) -> Costs:
    """Computes the costs of a program from a trace or from `stack_profile.traces.hlo.program_of`."""
    from stack_core.programs.hlo_costs import executed_flops, instruction_costs, memory_traffic  # imports jax

    module, memory = program.module, memory_of(program)
    groups: dict[tuple[str, str, str], dict[str, int]] = {}
    functions = {str(frame): frame.function for each in program.instructions.values() for frame in each.frames}

    def add(line: str, layer: str, **amounts: int) -> None:
        sums = groups.setdefault((line, functions.get(line, ""), layer), dict.fromkeys(_SUMMED, 0))
        for name, amount in amounts.items():
            sums[name] += amount

    costs = instruction_costs(module) if module else {}
    for name, instruction in program.instructions.items():
        cost, times = costs.get(name), 0
        if cost is not None:
            # Loops with dynamic trip counts count once; a note lists them.
            times = 1 if cost.times is None else cost.times
        flops, traffic_bytes = (cost.flops.total * times, cost.traffic_bytes * times) if cost else (0, 0)
        line = str(instruction.source() or "")
        add(line, instruction.layer, flops=flops, traffic_bytes=traffic_bytes, instructions=1)
    for row in memory.rows:
        add(row.line, row.layer, memory_bytes=row.size_bytes)
    total = executed_flops(module) if module else None
    return Costs(
        program=program.name,
        flops=total.total if total else None,
        traffic_bytes=memory_traffic(module) if module else None,
        memory_bytes=memory.facts.get("total_bytes"),
        instructions=len(program.instructions),
        compile_s=tuple(compile_s),
        about=about or {},
        rows=tuple(CostRow(*place, **sums) for place, sums in groups.items()),
        notes=tuple(
            _notes(program, total.uncounted if total else (), known=memory.facts.get("total_bytes") is not None)
        ),
    )


_SUMMED: Final = ("flops", "traffic_bytes", "memory_bytes", "instructions")


def _notes(program: Program, uncounted: Sequence[str], *, known: bool) -> Sequence[str]:
    notes = ["FLOPs count matrix products and convolutions; custom calls do not report theirs."]
    if program.module is None:
        notes.append(f"This version of XLA cannot read {program.name}: its FLOPs are unknown.")
    if uncounted:
        notes.append(f"Loops with a data-dependent number of iterations are counted once: {'; '.join(uncounted)}.")
    if not known:
        notes.append(f"The HLO of {program.name} lacks its buffers: its memory is unknown.")
    return notes
