"""Compiled programs as traces carry them: HloProto, read without XLA's schemas.

Each instruction is joined with the Python lines that asked for it. What XLA itself inserted, mostly copies, has none
of its own; it takes those of what it copies for, and says so.
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from stack_core.errors import HardwareError
from stack_profile.errors import TraceError
from stack_profile.traces.scopes import Scope, parse_op_name
from stack_profile.traces.wire import Value, WireError, encode_bytes, fields, signed, varints

if TYPE_CHECKING:
    import jax

    from stack_core.hardware.hlo import Module

__all__ = [
    "CONTAINERS",
    "Frame",
    "Instruction",
    "Origin",
    "Program",
    "hlo_proto",
    "program_key",
    "program_of",
    "read_program",
]

Origin = Literal["own", "fused", "operand", "user", "caller", "none"]

# Instructions that run others: their time is that of what they run.
CONTAINERS: Final = frozenset({"while", "conditional", "call", "async-start", "async-done", "async-update"})


@dataclass(frozen=True)
class Frame:
    """A line of Python that was being executed while the operation was traced."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      id: unique in the module.
      computation: the function of the module that it is in.
      op_name: "jit(step)/jvp(mlp)/dot_general", or "".
      frames: the Python stack, innermost first; empty where none is known.
      origin: whose op_name and frames these are: its own; those of what it fuses; of what it reads; of what reads it;
        of the loop or call that it is in; or nobody's.
      fused: it is a part of a fusion and never runs for itself.
      opcodes: its own, or those of what it fuses.
      target: which library or kernel a custom call calls, or "".
      argument: of a parameter the name that JAX gave it, such as "state.params['kernel']", or "".
    """

    id: int
    name: str
    opcode: str
    computation: str
    op_name: str
    frames: tuple[Frame, ...]
    origin: Origin
    fused: bool
    opcodes: frozenset[str]
    target: str
    argument: str

    @property
    def scope(self) -> Scope:
        return parse_op_name(self.op_name)

    @property
    def layer(self) -> str:
        """The named scopes; where the program names none, the classes whose `__call__` it is in; or ""."""
        if path := self.scope.path:
            return path
        traced = match[1] if (match := _TRACED.match(self.op_name)) else None
        classes: list[str] = []
        for frame in self.frames:
            if frame.function.rpartition(".")[2] == traced:
                break  # what is around it called the program
            name = match[1] if (match := _CALL.search(frame.function)) else None
            if name in classes[:-1]:
                break  # JAX puts the stack of the pass being differentiated on top of its own
            if name is not None and classes[-1:] != [name]:
                classes.append(name)
        return "/".join(reversed(classes))

    def source(self, within: str = "") -> Frame | None:
        """The innermost line, of a file under `within` if that is given; None where none is known."""
        return next((frame for frame in self.frames if frame.file.startswith(within)), None)


@dataclass(frozen=True)
class Program:
    """A compiled module.

    Attributes:
      key: what the trace's events call it; unique in one process.
      entry: the name of the computation that a run of it starts.
      instructions: all of the module, by name.
      proto: the serialized HloProto.
    """

    name: str
    key: int
    entry: str
    instructions: Mapping[str, Instruction] = field(repr=False)
    proto: bytes = field(repr=False)

    @functools.cached_property
    def buffers(self) -> bytes | None:
        """The serialized BufferAssignmentProto; None where there is none."""
        place = dict(fields(self.proto)).get(_PROTO_BUFFERS)
        return self.proto[slice(*place)] if isinstance(place, tuple) else None

    @functools.cached_property
    def module(self) -> "Module | None":
        """The module as its costs are read from; None where this version of XLA cannot read it."""
        from jax._src.lib import hlo  # JAX has no public way from a serialized module to its text

        from stack_core.hardware.hlo import parse_hlo  # imports jax, which reading a trace does without

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


def read_program(proto: bytes, key: int) -> Program:
    """Reads a serialized HloProto.

    Raises:
      TraceError: it is damaged, or none.
    """
    try:
        place = dict(fields(proto)).get(_PROTO_MODULE)
        if not isinstance(place, tuple):
            raise TraceError(f"Program {key} is no HloProto: it holds no module.")
        name, entry, computations, frames = _module(proto, place)
        return Program(name, key, entry, _Attribution(computations, frames).instructions(), proto)
    except (WireError, IndexError) as error:
        raise TraceError(f"The HLO of program {key} is damaged: {error}. Capture again.") from error


def program_key(proto: bytes) -> int:
    """The number of a HloProto's module, by which the events of CPUs name the program that they are of.

    Raises:
      WireError: it is damaged.
    """
    place = dict(fields(proto)).get(_PROTO_MODULE)
    key = dict(fields(proto, *place)).get(_MODULE_ID, 0) if isinstance(place, tuple) else 0
    return key if isinstance(key, int) else 0


_PROTO_MODULE, _PROTO_BUFFERS = 1, 3
_MODULE_NAME, _MODULE_ENTRY, _MODULE_COMPUTATIONS, _MODULE_ID, _MODULE_FRAMES = 1, 2, 3, 5, 17
_CALL: Final = re.compile(r"(\w+)\.__call__\b")
_TRACED: Final = re.compile(r"p?jit\(([^()]+)\)")


@dataclass(frozen=True)
class _Raw:
    """An instruction as it stands in the proto; ids are unique in the module.

    Attributes:
      frame: the number of its Python stack, 0 where it has none.
      source: its line alone, which is all that older versions of XLA kept.
    """

    id: int
    name: str
    opcode: str
    op_name: str
    frame: int
    source: Frame | None
    operands: tuple[int, ...]
    called: tuple[int, ...]
    target: str


@dataclass(frozen=True)
class _Computation:
    id: int
    name: str
    root: int
    instructions: tuple[_Raw, ...]


def _module(
    data: bytes, place: tuple[int, int]
) -> tuple[str, str, tuple[_Computation, ...], tuple[tuple[Frame, ...], ...]]:
    """Its name, that of its entry, its computations, the Python stacks."""
    name = entry = ""
    computations: list[_Computation] = []
    frames: tuple[tuple[Frame, ...], ...] = ((),)
    for number, value in fields(data, *place):
        if number == _MODULE_NAME:
            name = _text(data, value)
        elif number == _MODULE_ENTRY:
            entry = _text(data, value)
        elif number == _MODULE_COMPUTATIONS and isinstance(value, tuple):
            computations.append(_computation(data, value))
        elif number == _MODULE_FRAMES and isinstance(value, tuple):
            frames = _stacks(data, value)
    return name, entry, tuple(computations), frames


def _computation(data: bytes, place: tuple[int, int]) -> _Computation:
    name, key, root = "", 0, 0
    instructions: list[_Raw] = []
    for number, value in fields(data, *place):
        if number == 1:
            name = _text(data, value)
        elif number == 2 and isinstance(value, tuple):
            instructions.append(_instruction(data, value))
        elif number == 5 and isinstance(value, int):
            key = value
        elif number == 6 and isinstance(value, int):
            root = value
    return _Computation(key, name, root, tuple(instructions))


def _instruction(data: bytes, place: tuple[int, int]) -> _Raw:
    name = opcode = op_name = target = ""
    key = frame = 0
    source: Frame | None = None
    operands: list[int] = []
    called: list[int] = []
    for number, value in fields(data, *place):
        if number == 1:
            name = _text(data, value)
        elif number == 2:
            opcode = _text(data, value)
        elif number == 7 and isinstance(value, tuple):
            metadata = dict(fields(data, *value))
            op_name, frame = _text(data, metadata.get(2, 0)), _integer(metadata.get(15))
            if file := _text(data, metadata.get(3, 0)):
                source = Frame(file, signed(_integer(metadata.get(4))), "")
        elif number == 28:
            target = _text(data, value)
        elif number == 35:
            key = _integer(value)
        elif number == 36:
            operands += varints(data, value)
        elif number == 38:
            called += varints(data, value)
    return _Raw(key, name, opcode, op_name, frame, source, tuple(operands), tuple(called), target)


def _stacks(data: bytes, place: tuple[int, int]) -> tuple[tuple[Frame, ...], ...]:
    """The Python stack of each frame's number, innermost first; number 0 is none."""
    tables: dict[int, list[Value]] = {1: [], 2: [], 3: [], 4: []}
    for number, value in fields(data, *place):
        tables.setdefault(number, []).append(value)
    files, functions = ([_text(data, value) for value in tables[table]] for table in (1, 2))
    locations = [_numbers(data, value) for value in tables[3]]
    lines = [
        Frame(files[place.get(1, 0) - 1], signed(place.get(3, 0)), functions[place.get(2, 0) - 1])
        for place in locations
    ]
    stacks: list[tuple[Frame, ...]] = [()]
    for value in tables[4]:
        frame = _numbers(data, value)
        parent = frame.get(2, 0)
        stacks.append((lines[frame.get(1, 0) - 1], *(stacks[parent] if parent < len(stacks) else ())))
    return tuple(stacks)


def _numbers(data: bytes, value: Value) -> dict[int, int]:
    found = fields(data, *value) if isinstance(value, tuple) else ()
    return {number: each for number, each in found if isinstance(each, int)}


def _text(data: bytes, value: Value) -> str:
    return data[slice(*value)].decode(errors="replace") if isinstance(value, tuple) else ""


def _integer(value: Value | None) -> int:
    return value if isinstance(value, int) else 0


class _Attribution:
    """Finds for each instruction whose source it has."""

    def __init__(self, computations: Iterable[_Computation], stacks: tuple[tuple[Frame, ...], ...]) -> None:
        self._stacks = stacks
        self._computations = {computation.id: computation for computation in computations}
        self._raw = {raw.id: raw for computation in self._computations.values() for raw in computation.instructions}
        self._home = {raw.id: each for each in self._computations.values() for raw in each.instructions}
        self._any_located = any(map(self._located, self._raw.values()))
        self._users: dict[int, list[int]] = {}
        self._callers: dict[int, _Raw] = {}
        for raw in self._raw.values():
            for operand in raw.operands:
                self._users.setdefault(operand, []).append(raw.id)
            for called in raw.called:
                self._callers.setdefault(called, raw)

    def instructions(self) -> dict[str, Instruction]:
        return {raw.name: self._instruction(raw) for raw in self._raw.values()}

    def _instruction(self, raw: _Raw) -> Instruction:
        donor, origin = self._donor(raw)
        home = self._home[raw.id]
        caller = self._callers.get(home.id)
        return Instruction(
            id=raw.id,
            name=raw.name,
            opcode=raw.opcode,
            computation=home.name,
            op_name=raw.op_name if donor is None else donor.op_name,
            frames=() if donor is None else self._frames(donor),
            origin=origin,
            fused=caller is not None and caller.opcode == "fusion",
            opcodes=frozenset(each.opcode for each in self._inside(raw)) or frozenset({raw.opcode}),
            target=raw.target,
            argument=raw.op_name if raw.opcode == "parameter" else "",
        )

    def _donor(self, raw: _Raw) -> tuple[_Raw | None, Origin]:
        if self._located(raw):
            return raw, "own"
        if not self._any_located:
            return None, "none"
        searches: tuple[tuple[Origin, Iterator[_Raw]], ...] = (
            ("fused", self._inside(raw)),
            ("operand", self._reach(raw, lambda each: each.operands)),
            ("user", self._reach(raw, lambda each: self._users.get(each.id, ()))),
            ("caller", self._around(raw)),
        )
        for origin, found in searches:
            if (donor := next(filter(self._located, found), None)) is not None:
                return donor, origin
        return None, "none"

    def _located(self, raw: _Raw) -> bool:
        return bool(self._frames(raw))

    def _frames(self, raw: _Raw) -> tuple[Frame, ...]:
        if 0 < raw.frame < len(self._stacks):
            return self._stacks[raw.frame]
        return () if raw.source is None else (raw.source,)

    def _inside(self, raw: _Raw) -> Iterator[_Raw]:
        """The instructions of a fusion, the result first."""
        for called in raw.called if raw.opcode == "fusion" else ():
            if called in self._computations:
                yield from reversed(self._computations[called].instructions)

    def _reach(self, raw: _Raw, neighbours: Callable[[_Raw], Iterable[int]]) -> Iterator[_Raw]:
        """What leads to, or from, an instruction: the nearest first."""
        seen, wave = {raw.id}, [raw]
        while wave:
            keys = dict.fromkeys(key for each in wave for key in neighbours(each) if key not in seen)
            seen.update(keys)
            wave = [self._raw[key] for key in keys if key in self._raw]
            yield from wave

    def _around(self, raw: _Raw) -> Iterator[_Raw]:
        """The loops and calls that an instruction is in, the innermost first."""
        caller, seen = self._callers.get(self._home[raw.id].id), {raw.id}
        while caller is not None and caller.id not in seen:
            yield caller
            seen.add(caller.id)
            caller = self._callers.get(self._home[caller.id].id)
