"""XLA's placement of a program's arrays in memory, and the live arrays at each point of its schedule.

A program's memory consists of allocations. Each argument, output and constant has an allocation; temporaries share one,
and are allocated and freed along the schedule, as XLA simulated it during buffer assignment.
https://github.com/openxla/xla/blob/main/xla/service/hlo.proto: BufferAssignmentProto
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stack_profile.errors import TraceError
from stack_profile.traces.hlo import Program
from stack_profile.traces.wire import Value, WireError, fields

__all__ = ["Allocation", "Assignment", "Buffer", "Kind", "Moment", "Schedule", "read_buffers"]

Kind = Literal["argument", "donated argument", "output", "constant", "temporary"]


@dataclass(frozen=True)
class Buffer:
    """An array of the program.

    Attributes:
      size_bytes: size of the array.
      instruction: name of the producing instruction; "" if unknown.
    """

    size_bytes: int
    instruction: str


@dataclass(frozen=True)
class Allocation:
    """A piece of memory that exists while the program runs.

    Attributes:
      index: XLA's index of the allocation.
      size_bytes: size of the allocation.
      kind: use of the allocation.
      buffers: ids of its buffers.
    """

    index: int
    size_bytes: int
    kind: Kind
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """A point of the schedule, after an instruction allocated or freed memory.

    Attributes:
      instruction: name of the instruction.
      live_bytes: total size of the live buffers.
      live: ids of the live buffers, except buffers that share another's memory.
    """

    instruction: str
    live_bytes: int
    live: frozenset[int]


@dataclass(frozen=True)
class Assignment:
    """Memory of one device while a program runs.

    Attributes:
      allocations: allocations in the main memory.
      buffers: arrays by id.
      schedules: schedules of allocations with temporaries; empty without XLA's heap traces.
      elsewhere_bytes: size of allocations in other memory spaces, such as a TPU's VMEM or the host.
    """

    allocations: tuple[Allocation, ...]
    buffers: Mapping[int, Buffer]
    schedules: tuple["Schedule", ...]
    elsewhere_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(allocation.size_bytes for allocation in self.allocations)

    def bytes_of(self, *kinds: Kind) -> int:
        return sum(allocation.size_bytes for allocation in self.allocations if allocation.kind in kinds)


@dataclass(frozen=True)
class Schedule:
    """Sequence of allocations and frees of the buffers in one allocation.

    Attributes:
      events: tuples (event kind, buffer, instruction, buffer whose memory it shares).
      sizes: size of each buffer in bytes.
    """

    events: tuple[tuple[int, int, str, int], ...]
    sizes: Mapping[int, int]

    def allocation(self, allocations: Sequence[Allocation]) -> Allocation | None:
        """Returns the schedule's allocation, or None for one outside of `allocations`."""
        own = {buffer for _, buffer, _, _ in self.events}
        # A heap trace does not name its allocation, so the largest overlap of buffers decides.
        found = max(allocations, key=lambda each: len(own & set(each.buffers)), default=None)
        return None if found is None or own.isdisjoint(found.buffers) else found

    def moments(self) -> Iterator[Moment]:
        """Yields the state after each event that changes the live memory."""
        owner: dict[int, int] = {}  # sharing buffer -> buffer that owns the memory
        users: dict[int, int] = {}  # owner -> number of buffers that use its memory
        live_bytes = 0
        for kind, buffer, instruction, canonical in self.events:
            if kind == _SHARE:
                owner[buffer] = owner.get(canonical, canonical)
            holder = owner.get(buffer, buffer)
            before = users.get(holder, 0)
            # A damaged trace may free a buffer that was never allocated.
            after = max(0, before - 1) if kind == _FREE else before + 1
            users[holder] = after
            # Only the first and the last user of a piece of memory change its size.
            if (before == 0) != (after == 0):
                live_bytes += self.sizes.get(holder, 0) * (1 if after else -1)
                yield Moment(instruction, live_bytes, frozenset(key for key, count in users.items() if count))

    def peak(self) -> Moment:
        """Returns the first moment with the most live bytes."""
        return max(self.moments(), key=lambda moment: moment.live_bytes, default=Moment("", 0, frozenset()))


def read_buffers(program: Program) -> Assignment | None:
    """Reads a program's buffers, or returns None for a trace without buffers.

    Raises:
      TraceError: the buffers are damaged.
    """
    if program.buffers is None:
        return None
    try:
        return _assignment(program.buffers, {each.id: each.name for each in program.instructions.values()})
    except WireError as error:
        raise TraceError(f"The buffers of {program.name} are damaged: {error}. Capture again.") from error


_ALLOCATE, _FREE, _SHARE = 0, 1, 2
_LOGICAL_BUFFERS, _ALLOCATIONS, _TRACES = 1, 3, 4
_BUFFER_SIZE, _BUFFER_DEFINED_AT = 2, 3
# Fields of BufferAllocationProto, see `_kind`.
_THREAD_LOCAL, _IS_PARAMETER, _LIVE_OUT, _SPACE, _ASSIGNED, _CONSTANT = 3, 5, 7, 8, 9, 12
_EVENTS = 1


def _assignment(data: bytes, names: Mapping[int, str]) -> Assignment:
    parts: dict[int, list[Value]] = {_LOGICAL_BUFFERS: [], _ALLOCATIONS: [], _TRACES: []}
    for number, value in fields(data):
        parts.get(number, []).append(value)
    buffers = dict(_buffer(data, value, names) for value in parts[_LOGICAL_BUFFERS])
    spaces: dict[bool, list[Allocation]] = {True: [], False: []}
    for value in parts[_ALLOCATIONS]:
        if (found := _allocation(data, value)) is not None:
            # Memory space 0 is the main memory of the device.
            spaces[_integer(_message(data, value).get(_SPACE)) == 0].append(found)
    sizes = {key: buffer.size_bytes for key, buffer in buffers.items()}
    schedules = [Schedule(_events(data, value), sizes) for value in parts[_TRACES]]
    return Assignment(
        allocations=tuple(spaces[True]),
        buffers=buffers,
        schedules=tuple(each for each in schedules if each.allocation(spaces[True]) is not None),
        elsewhere_bytes=sum(allocation.size_bytes for allocation in spaces[False]),
    )


def _buffer(data: bytes, value: Value, names: Mapping[int, str]) -> tuple[int, Buffer]:
    found = _message(data, value)
    place = _message(data, found.get(_BUFFER_DEFINED_AT, 0))
    return _integer(found.get(1)), Buffer(_integer(found.get(_BUFFER_SIZE)), names.get(_integer(place.get(4)), ""))


def _allocation(data: bytes, value: Value) -> Allocation | None:
    """Reads an allocation; None for thread-local memory."""
    found = _message(data, value)
    if _integer(found.get(_THREAD_LOCAL)):
        return None
    assigned = [each for number, each in fields(data, *_place(value)) if number == _ASSIGNED]
    buffers = tuple(_integer(_message(data, each).get(1)) for each in assigned)
    return Allocation(_integer(found.get(1)), _integer(found.get(2)), _kind(found), buffers)


def _kind(allocation: Mapping[int, Value]) -> Kind:
    is_output = _integer(allocation.get(_LIVE_OUT))
    if _integer(allocation.get(_IS_PARAMETER)):
        return "donated argument" if is_output else "argument"
    if is_output:
        return "output"
    return "constant" if _integer(allocation.get(_CONSTANT)) else "temporary"


def _events(data: bytes, value: Value) -> tuple[tuple[int, int, str, int], ...]:
    found = []
    for number, each in fields(data, *_place(value)):
        if number == _EVENTS:
            event = _message(data, each)
            kind, buffer, canonical = (_integer(event.get(part)) for part in (1, 2, 5))
            found.append((kind, buffer, data[slice(*_place(event.get(4, 0)))].decode(errors="replace"), canonical))
    return tuple(found)


def _message(data: bytes, value: Value) -> dict[int, Value]:
    """Returns the fields of a message, with the last value of repeated fields."""
    return dict(fields(data, *_place(value)))


def _place(value: Value) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (0, 0)


def _integer(value: Value | None) -> int:
    return value if isinstance(value, int) else 0
