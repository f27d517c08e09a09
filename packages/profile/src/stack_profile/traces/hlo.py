"""Compiled programs as traces carry them: HloProto, read without XLA's schemas.

Each instruction is joined with the Python lines that asked for it. What XLA itself inserted, mostly copies, has none
of its own; it takes those of what it copies for, and says so.
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stack_core.abi.errors import HardwareError
from stack_profile.errors import TraceError
from stack_profile.traces.attribution import attributed
from stack_profile.traces.hlo_module import module_head, read_module
from stack_profile.traces.instructions import Instruction
from stack_profile.traces.wire import WireError, encode_bytes, fields

if TYPE_CHECKING:
    import jax

    from stack_core.programs.hlo import Module

__all__ = ["Program", "hlo_proto", "outline", "program_key", "program_of", "read_program"]


@dataclass(frozen=True)
class Program:
    """A compiled module; what is in it is read on first use, for most programs of a process run in no trace.

    Attributes:
      key: unique in one process; the trace's events call it so where this process compiled it.
      proto: the serialized HloProto.
    """

    name: str
    key: int
    proto: bytes = field(repr=False)

    @property
    def entry(self) -> str:
        """The name of the computation that a run of it starts."""
        return self._content[0]

    @property
    def instructions(self) -> Mapping[str, Instruction]:
        """All of the module, by name.

        Raises:
          TraceError: the module is damaged.
        """
        return self._content[1]

    @functools.cached_property
    def _content(self) -> tuple[str, Mapping[str, Instruction]]:
        try:
            module = read_module(self.proto, _module_place(self.proto, self.key))
        except (WireError, IndexError) as error:
            raise _damaged(self.key, error) from error
        return module.entry, attributed(module)

    @functools.cached_property
    def buffers(self) -> bytes | None:
        """The serialized BufferAssignmentProto; None where there is none."""
        place = dict(fields(self.proto)).get(_PROTO_BUFFERS)
        return self.proto[slice(*place)] if isinstance(place, tuple) else None

    @functools.cached_property
    def module(self) -> "Module | None":
        """The module as its costs are read from; None where this version of XLA cannot read it."""
        from jax._src.lib import hlo  # JAX has no public way from a serialized module to its text

        from stack_core.programs.hlo import parse_hlo  # imports jax, which reading a trace does without

        place = dict(fields(self.proto)).get(_PROTO_MODULE)
        if not isinstance(place, tuple):
            return None
        try:
            return parse_hlo(hlo.HloModule.from_serialized_hlo_module_proto(self.proto[slice(*place)]).to_string())
        except (RuntimeError, ValueError, HardwareError):  # XLA's errors are RuntimeErrors of several names
            return None


def program_of(compiled: "jax.stages.Compiled", key: int = 0) -> Program:
    """The program of a compiled function, with its buffers; nothing runs.

    Raises:
      TraceError: the backend does not give its HLO.
    """
    executable = compiled.runtime_executable()
    if executable is None:
        raise TraceError("The compiled function has no executable to read, as on backends without one.")
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    stats = executable.get_compiled_memory_stats()
    return read_program(hlo_proto(module, getattr(stats, "serialized_buffer_assignment_proto", b"")), key)


def hlo_proto(module: bytes, buffer_assignment: bytes = b"") -> bytes:
    """The HloProto of a serialized HloModuleProto, and of its BufferAssignmentProto if there is one."""
    parts = ((_PROTO_MODULE, module), (_PROTO_BUFFERS, buffer_assignment))
    return b"".join(encode_bytes(number, content) for number, content in parts if content)


def outline(proto: bytes, key: int) -> Program:
    """A serialized HloProto, of which no more than the name is read.

    Raises:
      TraceError: it is visibly damaged, or none.
    """
    try:
        return Program(module_head(proto, _module_place(proto, key))[0], key, proto)
    except WireError as error:
        raise _damaged(key, error) from error


def read_program(proto: bytes, key: int) -> Program:
    """Reads a serialized HloProto.

    Raises:
      TraceError: it is damaged, or none.
    """
    program = outline(proto, key)
    _ = program.instructions  # whose reading finds damage
    return program


def program_key(proto: bytes) -> int:
    """The number of a HloProto's module, by which the events of CPUs name the program that they are of.

    Raises:
      WireError: it is damaged.
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
