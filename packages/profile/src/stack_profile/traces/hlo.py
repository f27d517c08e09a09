"""Compiled programs in a trace (HloProto), read without XLA's schemas.

Each instruction is joined with its Python lines. Instructions that XLA inserted, mostly copies, take the lines of
neighbouring instructions, and `Instruction.origin` records which.
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stack_core.abi.errors import HardwareError
from stack_profile.errors import TraceError
from stack_profile.traces.attribution import attributed
from stack_profile.traces.hlo_module import RawModule, module_head, module_schedule, read_module
from stack_profile.traces.instructions import Instruction
from stack_profile.traces.launches import Launches
from stack_profile.traces.wire import WireError, encode_bytes, fields

if TYPE_CHECKING:
    import jax

    from stack_core.programs.hlo import Module
    from stack_core.programs.hlo_costs import InstructionCost

__all__ = ["Program", "hlo_proto", "outline", "program_key", "program_of", "read_program"]


@dataclass(frozen=True)
class Program:
    """A compiled module. Its contents are read on first use, because most loaded programs do not run during the trace.

    Attributes:
      name: name of the module.
      key: unique number in its process, also used in events if this process compiled the program.
      proto: serialized HloProto.
    """

    name: str
    key: int
    proto: bytes = field(repr=False)

    @property
    def entry(self) -> str:
        """Name of the computation at which a run starts."""
        return self._content[0]

    @property
    def instructions(self) -> Mapping[str, Instruction]:
        """All instructions of the module by name.

        Raises:
          TraceError: the module is damaged.
        """
        return self._content[1]

    @property
    def schedule(self) -> Mapping[int, tuple[int, ...]]:
        """Order of execution, see `RawModule`; reads nothing else.

        Raises:
          TraceError: the module is damaged.
        """
        try:
            return module_schedule(self.proto, _module_place(self.proto, self.key))
        except WireError as error:
            raise _damaged(self.key, error) from error

    @functools.cached_property
    def launches(self) -> Launches:
        """Instructions that launch kernels, in the order of the schedule.

        Raises:
          TraceError: the module is damaged.
        """
        return Launches.of(self._raw)

    @functools.cached_property
    def async_starts(self) -> Mapping[str, str]:
        """Name of the asynchronous start around each instruction that runs asynchronously; costs have this name."""
        module = self._raw
        computations = {each.id: each for each in module.computations}
        starts = (raw for each in module.computations for raw in each.instructions if raw.opcode == "async-start")
        return {
            inner.name: start.name
            for start in starts
            for called in start.called
            if called in computations
            for inner in computations[called].instructions
        }

    @functools.cached_property
    def damage(self) -> str:
        """Reason why the module cannot be read; "" if it can."""
        try:
            _ = self.instructions
        except TraceError as error:
            return str(error)
        return ""

    @functools.cached_property
    def _raw(self) -> RawModule:
        try:
            return read_module(self.proto, _module_place(self.proto, self.key))
        # Tables that contradict each other raise an IndexError.
        except (WireError, IndexError) as error:
            raise _damaged(self.key, error) from error

    @functools.cached_property
    def _content(self) -> tuple[str, Mapping[str, Instruction]]:
        module = self._raw
        return module.entry, attributed(module)

    @functools.cached_property
    def buffers(self) -> bytes | None:
        """Serialized BufferAssignmentProto, or None."""
        place = dict(fields(self.proto)).get(_PROTO_BUFFERS)
        return self.proto[slice(*place)] if isinstance(place, tuple) else None

    @functools.cached_property
    def module(self) -> "Module | None":
        """Parsed module for reading costs; None for a module that this version of XLA cannot read."""
        from jax._src.lib import hlo  # no public API of JAX turns a serialized module into text

        from stack_core.programs.hlo import parse_hlo  # imports jax, which is not needed to read a trace

        place = dict(fields(self.proto)).get(_PROTO_MODULE)
        if not isinstance(place, tuple):
            return None
        try:
            return parse_hlo(hlo.HloModule.from_serialized_hlo_module_proto(self.proto[slice(*place)]).to_string())
        except (RuntimeError, ValueError, HardwareError):  # XLA raises several subclasses of RuntimeError
            return None

    @functools.cached_property
    def costs(self) -> "Mapping[str, InstructionCost] | None":
        """Costs by instruction name; None for a module that this version of XLA cannot read."""
        from stack_core.programs.hlo_costs import instruction_costs  # imports jax

        # Once per program, because its module is parsed from text.
        return instruction_costs(self.module) if self.module else None


def program_of(compiled: "jax.stages.Compiled", key: int = 0) -> Program:
    """Reads the program of a compiled function, with its buffers; nothing runs.

    Raises:
      TraceError: the backend does not provide the HLO.
    """
    executable = compiled.runtime_executable()
    if executable is None:
        raise TraceError("The compiled function has no executable to read, as on backends without one.")
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    stats = executable.get_compiled_memory_stats()
    # Versions of jaxlib without this attribute do not provide the buffers.
    return read_program(hlo_proto(module, getattr(stats, "serialized_buffer_assignment_proto", b"")), key)


def hlo_proto(module: bytes, buffer_assignment: bytes = b"") -> bytes:
    """Builds an HloProto from a serialized HloModuleProto and, if not empty, its BufferAssignmentProto."""
    parts = ((_PROTO_MODULE, module), (_PROTO_BUFFERS, buffer_assignment))
    return b"".join(encode_bytes(number, content) for number, content in parts if content)


def outline(proto: bytes, key: int) -> Program:
    """Makes a program from a serialized HloProto, reading only its name.

    Raises:
      TraceError: the data is visibly damaged, or not an HloProto.
    """
    try:
        return Program(module_head(proto, _module_place(proto, key))[0], key, proto)
    except WireError as error:
        raise _damaged(key, error) from error


def read_program(proto: bytes, key: int) -> Program:
    """Reads a serialized HloProto completely.

    Raises:
      TraceError: the data is damaged, or not an HloProto.
    """
    program = outline(proto, key)
    _ = program.instructions  # reading them finds damage
    return program


def program_key(proto: bytes) -> int:
    """Returns the number of a HloProto's module, by which events of CPUs identify their program.

    Raises:
      WireError: the data is damaged.
    """
    place = dict(fields(proto)).get(_PROTO_MODULE)
    return module_head(proto, place)[1] if isinstance(place, tuple) else 0


def _module_place(proto: bytes, key: int) -> tuple[int, int]:
    place = dict(fields(proto)).get(_PROTO_MODULE)
    if not isinstance(place, tuple):
        raise TraceError(f"Program {key} is no HloProto: it holds no module.")
    return place


def _damaged(key: int, error: Exception) -> TraceError:
    return TraceError(f"The HLO of program {key} is damaged: {error}. Capture again.")


_PROTO_MODULE, _PROTO_BUFFERS = 1, 3
