"""HloModuleProto of a trace, read without XLA's schemas.

https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stack_profile.traces.instructions import Frame
from stack_profile.traces.wire import Value, fields, signed, varints

__all__ = ["Computation", "RawInstruction", "RawModule", "module_head", "module_schedule", "read_module"]

_NAME, _ENTRY, _COMPUTATIONS, _ID, _SCHEDULE, _FRAMES = 1, 2, 3, 5, 7, 17


@dataclass(frozen=True)
class RawInstruction:
    """An instruction of the proto.

    Attributes:
      id: unique id in the module.
      name: name of the instruction.
      opcode: opcode of the instruction.
      op_name: JAX's name of the operation, or "".
      frame: number of its Python stack, 0 for none.
      source: its Python line without a stack; older versions of XLA store nothing else.
      operands: ids of the operands.
      called: ids of the called computations.
      target: target of a custom call, or "".
      shape: serialized ShapeProto.
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
    shape: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Computation:
    """A function of the module."""

    id: int
    name: str
    instructions: tuple[RawInstruction, ...]


@dataclass(frozen=True)
class RawModule:
    """A module of the proto.

    Attributes:
      name: name of the module.
      entry: name of the computation at which a run starts.
      computations: functions of the module.
      stacks: Python stack of each frame number, innermost first; number 0 is empty.
      schedule: ids of the instructions in their order of execution, by id of the computation; empty if the module is
        not scheduled.
    """

    name: str
    entry: str
    computations: tuple[Computation, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    schedule: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def module_head(data: bytes, place: tuple[int, int]) -> tuple[str, int]:
    """Reads only the name and the id of a module.

    Raises:
      WireError: the module is damaged.
    """
    head = dict(fields(data, *place))
    return _text(data, head.get(_NAME, 0)), _integer(head.get(_ID))


def read_module(data: bytes, place: tuple[int, int]) -> RawModule:
    """Reads a module.

    Raises:
      WireError, IndexError: the module is damaged.
    """
    name = entry = ""
    computations: list[Computation] = []
    stacks: tuple[tuple[Frame, ...], ...] = ((),)
    schedule: Mapping[int, tuple[int, ...]] = {}
    for number, value in fields(data, *place):
        if number == _NAME:
            name = _text(data, value)
        elif number == _ENTRY:
            entry = _text(data, value)
        elif number == _COMPUTATIONS and isinstance(value, tuple):
            computations.append(_computation(data, value))
        elif number == _FRAMES and isinstance(value, tuple):
            stacks = _stacks(data, value)
        elif number == _SCHEDULE and isinstance(value, tuple):
            schedule = _schedule(data, value)
    return RawModule(name, entry, tuple(computations), stacks, schedule)


def module_schedule(data: bytes, place: tuple[int, int]) -> dict[int, tuple[int, ...]]:
    """Reads only the schedule of a module.

    Raises:
      WireError: the module is damaged.
    """
    found = dict(fields(data, *place)).get(_SCHEDULE)
    return _schedule(data, found) if isinstance(found, tuple) else {}


def _schedule(data: bytes, place: tuple[int, int]) -> dict[int, tuple[int, ...]]:
    # HloScheduleProto: 1 a map from the computation's id to InstructionSequence, whose field 1 has the ids.
    found: dict[int, tuple[int, ...]] = {}
    for number, entry in fields(data, *place):
        if number == 1 and isinstance(entry, tuple):
            parts = dict(fields(data, *entry))
            sequence = parts.get(2)
            ids = fields(data, *sequence) if isinstance(sequence, tuple) else ()
            found[_integer(parts.get(1))] = tuple(
                each for key, value in ids if key == 1 for each in varints(data, value)
            )
    return found


def _computation(data: bytes, place: tuple[int, int]) -> Computation:
    name, key = "", 0
    instructions: list[RawInstruction] = []
    # HloComputationProto: 1 name, 2 instructions, 5 id.
    for number, value in fields(data, *place):
        if number == 1:
            name = _text(data, value)
        elif number == 2 and isinstance(value, tuple):
            instructions.append(_instruction(data, value))
        elif number == 5 and isinstance(value, int):
            key = value
    return Computation(key, name, tuple(instructions))


def _instruction(data: bytes, place: tuple[int, int]) -> RawInstruction:
    name = opcode = op_name = target = ""
    shape = b""
    key = frame = 0
    source: Frame | None = None
    operands: list[int] = []
    called: list[int] = []
    # HloInstructionProto: 1 name, 2 opcode, 3 shape, 7 metadata, 28 target of a custom call, 35 id, 36 operands,
    # 38 called.
    for number, value in fields(data, *place):
        if number == 1:
            name = _text(data, value)
        elif number == 2:
            opcode = _text(data, value)
        elif number == 3 and isinstance(value, tuple):
            shape = data[slice(*value)]
        elif number == 7 and isinstance(value, tuple):
            op_name, frame, source = _origin(data, value)
        elif number == 28:
            target = _text(data, value)
        elif number == 35:
            key = _integer(value)
        elif number == 36:
            operands += varints(data, value)
        elif number == 38:
            called += varints(data, value)
    return RawInstruction(key, name, opcode, op_name, frame, source, tuple(operands), tuple(called), target, shape)


def _origin(data: bytes, place: tuple[int, int]) -> tuple[str, int, Frame | None]:
    """Returns JAX's name of an instruction, the number of its stack, and its line."""
    # OpMetadata: 2 op_name, 3 source_file, 4 source_line, 15 stack_frame_id.
    metadata = dict(fields(data, *place))
    file = _text(data, metadata.get(3, 0))
    source = Frame(file, signed(_integer(metadata.get(4))), "") if file else None
    return _text(data, metadata.get(2, 0)), _integer(metadata.get(15)), source


def _stacks(data: bytes, place: tuple[int, int]) -> tuple[tuple[Frame, ...], ...]:
    """Returns the Python stack of each frame number, innermost first; number 0 is empty."""
    # StackFrameIndexProto: 1 file names, 2 function names, 3 file locations, 4 stack frames.
    tables: dict[int, list[Value]] = {1: [], 2: [], 3: [], 4: []}
    for number, value in fields(data, *place):
        tables.setdefault(number, []).append(value)
    files, functions = ([_text(data, value) for value in tables[table]] for table in (1, 2))
    locations = [_numbers(data, value) for value in tables[3]]
    lines = [
        # The first id in these tables is 1.
        Frame(files[place.get(1, 0) - 1], signed(place.get(3, 0)), functions[place.get(2, 0) - 1])
        for place in locations
    ]
    stacks: list[tuple[Frame, ...]] = [()]
    for value in tables[4]:
        frame = _numbers(data, value)
        parent = frame.get(2, 0)
        # A parent comes before its frames, so its stack is already known.
        stacks.append((lines[frame.get(1, 0) - 1], *(stacks[parent] if parent < len(stacks) else ())))
    return tuple(stacks)


def _numbers(data: bytes, value: Value) -> dict[int, int]:
    found = fields(data, *value) if isinstance(value, tuple) else ()
    return {number: each for number, each in found if isinstance(each, int)}


def _text(data: bytes, value: Value) -> str:
    return data[slice(*value)].decode(errors="replace") if isinstance(value, tuple) else ""


def _integer(value: Value | None) -> int:
    return value if isinstance(value, int) else 0
