"""Alignment of a program's source lines across an edit, based on the operations of each line, without the sources.

Lines of a function are aligned by the operations that they request. A line aligned with none before is new. An
operation whose fusion includes a part from a new line is assigned to that line, which causes its additional time.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from stack_profile.traces.instructions import Frame, Instruction
from stack_profile.traces.operations import Operation

__all__ = ["Lines"]

_Function = tuple[str, str]  # file name without folders, which may differ between versions, and function name
_PASSIVE: Final = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "broadcast", "bitcast"})


@dataclass(frozen=True)
class Lines:
    """Alignment of the lines of two sides.

    Attributes:
      moved: line after for each line before.
      new: lines after without a line before.
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
        """Returns the line of an operation of the side after: a new line among its parts, otherwise its own line."""
        lines = [line for each in _parts(operation) if (line := each.source()) is not None]
        own = operation.instruction.source() if operation.instruction else None
        return str(next((line for line in lines if line in self.new), own) or "")

    def before(self, operation: Operation) -> str:
        """Returns the line of an operation of the side before, mapped to the side after."""
        own = operation.instruction.source() if operation.instruction else None
        return "" if own is None else str(self.moved.get(own, own))


def _parts(operation: Operation) -> Iterator[Instruction]:
    """Yields the non-passive instructions of an operation, or of its fusion."""
    program, instruction = operation.program, operation.instruction
    if program is None or instruction is None:
        return
    parts = [program.instructions[name] for name in instruction.parts if name in program.instructions]
    yield from (each for each in parts or [instruction] if each.opcode not in _PASSIVE)


def _functions(operations: Iterable[Operation]) -> dict[_Function, dict[Frame, set[str]]]:
    """Returns the lines of each function, with the primitives that they request in programs that ran."""
    programs = {id(each.program): each.program for each in operations if each.program is not None}
    found: dict[_Function, dict[Frame, set[str]]] = {}
    for instruction in (each for program in programs.values() for each in program.instructions.values()):
        # Other instructions have borrowed their line.
        line = instruction.source() if instruction.origin == "own" and instruction.opcode not in _PASSIVE else None
        if line is not None:
            function = PurePath(line.file).name, line.function
            found.setdefault(function, {}).setdefault(line, set()).add(instruction.scope.primitive)
    return found


def _aligned(before: Mapping[Frame, set[str]], after: Mapping[Frame, set[str]]) -> Iterator[tuple[Frame, Frame]]:
    """Yields pairs of lines of a function that are the same or similar."""
    earlier, later = (sorted(side, key=lambda line: line.line) for side in (before, after))
    does = [[frozenset(side[line]) for line in lines] for side, lines in ((before, earlier), (after, later))]
    # `autojunk` would ignore frequent operations in functions of 200 lines or more.
    for kind, low, high, first, last in difflib.SequenceMatcher(None, *does, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(earlier[low:high], later[first:last], strict=True)
        elif kind == "replace":
            yield from _likest(before, after, earlier[low:high], later[first:last])


def _likest(
    before: Mapping[Frame, set[str]], after: Mapping[Frame, set[str]], earlier: Sequence[Frame], later: Sequence[Frame]
) -> Iterator[tuple[Frame, Frame]]:
    """Pairs each line, in order, with the remaining line whose operations are most similar."""
    free = list(later)
    for line in earlier:
        if not free:
            return
        # Jaccard similarity of the requested operations.
        shared = [len(before[line] & after[each]) / len(before[line] | after[each]) for each in free]
        place = shared.index(max(shared))
        if shared[place] > 0:
            yield line, free[place]
            # Edits keep the order of most lines, so the next line cannot match an earlier place.
            free = free[place + 1 :]
