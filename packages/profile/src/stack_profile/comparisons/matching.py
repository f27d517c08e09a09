"""Which operation of one compilation is which of another: names such as fusion.12 change whenever a program does.

An operation is known by where it comes from and what it does. Operations are matched by all of that first; what is
left, by less and less of it: from another line, with other shapes, fused otherwise. Where there are as many of a kind
on both sides they are matched one to one in the order of their lines; where not, all of them together, as one kind.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal

from stack_profile.traces.categories import category
from stack_profile.traces.hlo import Program
from stack_profile.traces.operations import Operation

if TYPE_CHECKING:
    from stack_core.programs.hlo import ArrayShape

__all__ = ["How", "Match", "Site", "match", "sites"]

How = Literal["alike", "moved", "other shapes", "other form", "appeared", "disappeared"]


@dataclass(frozen=True)
class Site:
    """Where an operation comes from and what it does, without the names that a compiler gave.

    Attributes:
      file: its name alone: two versions of a program may lie in two folders.
      shapes: of the operands, then of the results; none where the program cannot be read.
      ordinal: its place among those that are alike in all else, in the order of the program.
    """

    module: str
    layer: str
    direction: str
    primitive: str
    opcodes: frozenset[str]
    category: str
    shapes: "tuple[ArrayShape, ...]"
    file: str
    function: str
    line: int
    ordinal: int = 0


@dataclass(frozen=True)
class Match:
    """Places in the two sequences that were matched, of operations that are the same, or the same kind."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    how: How


def sites(operations: Sequence[Operation]) -> list[Site]:
    """What identifies each operation of a capture, which are in the order of their programs; no two are equal."""
    shapes: "dict[int, Mapping[str, tuple[ArrayShape, ...]]]" = {}
    seen: dict[Site, int] = {}
    found: list[Site] = []
    for operation in operations:
        program = operation.program
        if program is not None and id(program) not in shapes:
            shapes[id(program)] = _shapes(program)
        site = _site(operation, shapes.get(id(program), {}))
        seen[site] = seen.get(site, -1) + 1
        found.append(dataclasses.replace(site, ordinal=seen[site]))
    return found


def match(before: Sequence[Site], after: Sequence[Site]) -> Iterator[Match]:
    """Matches two sides, each in the order of its programs; every place is in one match, what nothing is like alone."""
    left, right = dict(enumerate(before)), dict(enumerate(after))
    for how, key, one_to_one in _TIERS:
        kinds, others = _grouped(left, key), _grouped(right, key)
        for kind in [kind for kind in kinds if kind in others]:
            own, theirs = kinds[kind], others[kind]
            if len(own) != len(theirs) and one_to_one:
                continue
            for place in own:
                del left[place]
            for place in theirs:
                del right[place]
            if len(own) == len(theirs):
                for one, two in zip(own, theirs, strict=True):
                    moved = how == "alike" and before[one].line != after[two].line
                    yield Match((one,), (two,), "moved" if moved else how)
            else:
                yield Match(tuple(own), tuple(theirs), how)
    yield from (Match((place,), (), "disappeared") for place in left)
    yield from (Match((), (place,), "appeared") for place in right)


def _grouped(side: Mapping[int, Site], key: Callable[[Site], Hashable]) -> dict[Hashable, list[int]]:
    """Those of one kind in the order of their lines, which an edit above them leaves as it is."""
    groups: dict[Hashable, list[int]] = {}
    for place in sorted(side, key=lambda place: (side[place].line, place)):
        groups.setdefault(key(side[place]), []).append(place)
    return groups


def _does(site: Site) -> tuple[Hashable, ...]:
    return site.module, site.layer, site.direction, site.primitive, site.opcodes


def _function(site: Site) -> Hashable:
    return *_does(site), site.shapes, site.file, site.function


_Tier = tuple[How, Callable[[Site], Hashable], bool]
_TIERS: Final[tuple[_Tier, ...]] = (
    ("alike", _function, True),
    ("alike", lambda site: (_function(site), site.line), False),
    ("moved", _function, False),
    ("other shapes", lambda site: (*_does(site), site.file, site.function), False),
    ("other form", lambda site: (site.layer, site.direction, site.category, site.function), False),
)


def _site(operation: Operation, shapes: "Mapping[str, tuple[ArrayShape, ...]]") -> Site:
    instruction = operation.instruction
    if instruction is None:  # its name is all that is known of it
        opcodes = frozenset({operation.opcode})
        return Site(operation.module, "", "", "", opcodes, "unknown", (), file="", function=operation.name, line=0)
    frame, scope = instruction.source(), instruction.scope
    return Site(
        module=operation.module,
        layer=instruction.layer,
        direction=scope.direction,
        primitive=scope.primitive,
        opcodes=instruction.opcodes,
        category=category(instruction),
        shapes=shapes.get(instruction.name, ()),
        file=PurePath(frame.file).name if frame else "",
        function=frame.function if frame else "",
        line=frame.line if frame else 0,
    )


def _shapes(program: Program) -> "Mapping[str, tuple[ArrayShape, ...]]":
    """The types of the operands and results of each instruction, by its name."""
    if program.module is None:
        return {}
    return {
        name: tuple(shape for each in (*computation.operands(instruction), instruction) for shape in each.shapes)
        for computation in program.module.computations.values()
        for name, instruction in computation.instructions.items()
    }
