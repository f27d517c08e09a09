"""Which line of a program's source is which after an edit, read from what the lines compute: sources may be gone.

Lines of a function are aligned by the operations that each asks for. What is aligned with no line before is new, and an
operation that fuses something of a new line belongs to that line: what it takes more, it takes for it.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from stack_profile.traces.instructions import Frame, Instruction
from stack_profile.traces.operations import Operation

__all__ = ["Lines"]

_Function = tuple[str, str]  # the name of its file, without folders: two versions may lie in two; its own
_PASSIVE: Final = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "broadcast", "bitcast"})


@dataclass(frozen=True)
class Lines:
    """The lines of two sides.

    Attributes:
      moved: of a line before the line after.
      new: the lines after that are none before.
    """

    moved: Mapping[Frame, Frame]
    new: frozenset[Frame]

    @classmethod
    def of(cls, before: Iterable[Operation], after: Iterable[Operation]) -> "Lines":
        earlier, later = _functions(before), _functions(after)
        moved: dict[Frame, Frame] = {}
        for function in earlier.keys() & later.keys():
            moved |= _aligned(earlier[function], later[function])
        found = set(moved.values())
        return cls(moved, frozenset(line for lines in later.values() for line in lines if line not in found))

    def after(self, operation: Operation) -> str:
        """The line of an operation of the side after: a new one that it has a part of, or else its own."""
        lines = [line for each in _parts(operation) if (line := each.source()) is not None]
        own = operation.instruction.source() if operation.instruction else None
        return str(next((line for line in lines if line in self.new), own) or "")

    def before(self, operation: Operation) -> str:
        """The line of an operation of the side before, as it is called after."""
        own = operation.instruction.source() if operation.instruction else None
        return "" if own is None else str(self.moved.get(own, own))


def _parts(operation: Operation) -> Iterator[Instruction]:
    """The instructions of an operation that do something; those of its fusion where it is one."""
    program, instruction = operation.program, operation.instruction
    if program is None or instruction is None:
        return
    parts = [program.instructions[name] for name in instruction.parts if name in program.instructions]
    yield from (each for each in parts or [instruction] if each.opcode not in _PASSIVE)


def _functions(operations: Iterable[Operation]) -> dict[_Function, dict[Frame, set[str]]]:
    """The lines of each function, with the operations that they ask for in programs that ran."""
    programs = {id(each.program): each.program for each in operations if each.program is not None}
    found: dict[_Function, dict[Frame, set[str]]] = {}
    for instruction in (each for program in programs.values() for each in program.instructions.values()):
        line = instruction.source() if instruction.origin == "own" and instruction.opcode not in _PASSIVE else None
        if line is not None:
            function = PurePath(line.file).name, line.function
            found.setdefault(function, {}).setdefault(line, set()).add(instruction.scope.primitive)
    return found


def _aligned(before: Mapping[Frame, set[str]], after: Mapping[Frame, set[str]]) -> Iterator[tuple[Frame, Frame]]:
    """The lines of a function that are the same, or nearly."""
    earlier, later = (sorted(side, key=lambda line: line.line) for side in (before, after))
    does = [[frozenset(side[line]) for line in lines] for side, lines in ((before, earlier), (after, later))]
    for kind, low, high, first, last in difflib.SequenceMatcher(None, *does, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(earlier[low:high], later[first:last], strict=True)
        elif kind == "replace":
            yield from _likest(before, after, earlier[low:high], later[first:last])


def _likest(
    before: Mapping[Frame, set[str]], after: Mapping[Frame, set[str]], earlier: Sequence[Frame], later: Sequence[Frame]
) -> Iterator[tuple[Frame, Frame]]:
    """Pairs lines with those that do the most of what they do, in their order."""
    free = list(later)
    for line in earlier:
        if not free:
            return
        shared = [len(before[line] & after[each]) / len(before[line] | after[each]) for each in free]
        place = shared.index(max(shared))
        if shared[place] > 0:
            yield line, free[place]
            free = free[place + 1 :]
