"""Matching of operations between two compilations, in which names such as fusion.12 differ.

An operation is identified by its origin and its computation. Operations that agree in everything are matched first, the
rest by fewer and fewer properties: moved to another line, other shapes, fused differently. Equal numbers of one kind on
both sides are matched one to one in the order of their lines, otherwise all together as one kind.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal

from stack_profile.traces.categories import category_of
from stack_profile.traces.hlo import Program
from stack_profile.traces.operations import Operation

if TYPE_CHECKING:
    from stack_core.programs.hlo import ArrayShape

__all__ = ["How", "Match", "Site", "match", "sites"]

How = Literal["alike", "moved", "other shapes", "other form", "appeared", "disappeared"]


@dataclass(frozen=True)
class Site:
    """Origin and computation of an operation, without names from the compiler.

    Attributes:
      module: name of the program.
      layer, direction, primitive: layer, pass of training, and JAX's name of the operation.
      opcodes: opcodes of the operation or its fusion.
      category: category of work.
      shapes: shapes of the operands, then of the results; empty if the program cannot be read.
      file: file name without folders, since two versions of a program may be in different ones.
      function, line: function and line number of the user's line.
      ordinal: index among operations that are equal in everything else, in program order.
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
    """Indices in the two sequences of matched operations, either the same operation or the same kind.

    Attributes:
      before, after: indices on each side.
      how: agreement of the two sides.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    how: How


def sites(operations: Sequence[Operation]) -> list[Site]:
    """Returns the identity of each operation of a capture, given in program order; all identities are distinct."""
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
    """Matches two sides, each in program order; every index is in one match, unmatched operations by themselves."""
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
    """Groups a side by kind, each in the order of lines, which edits above them preserve."""
    groups: dict[Hashable, list[int]] = {}
    for place in sorted(side, key=lambda place: (side[place].line, place)):
        groups.setdefault(key(side[place]), []).append(place)
    return groups


def _does(site: Site) -> tuple[Hashable, ...]:
    return site.module, site.layer, site.direction, site.primitive, site.opcodes


def _function(site: Site) -> Hashable:
    return *_does(site), site.shapes, site.file, site.function


_Tier = tuple[How, Callable[[Site], Hashable], bool]
# From strict to loose. A tier that is one to one skips kinds with different numbers on both sides.
_TIERS: Final[tuple[_Tier, ...]] = (
    ("alike", _function, True),
    # If the numbers differ, operations on the same line are still alike.
    ("alike", lambda site: (_function(site), site.line), False),
    ("moved", _function, False),
    ("other shapes", lambda site: (*_does(site), site.file, site.function), False),
    ("other form", lambda site: (site.layer, site.direction, site.category, site.function), False),
)


def _site(operation: Operation, shapes: "Mapping[str, tuple[ArrayShape, ...]]") -> Site:
    instruction = operation.instruction
    if instruction is None:  # only its name is known
        opcodes = frozenset({operation.opcode})
        return Site(
            operation.module, "", "", "", opcodes, category_of(operation), (), file="", function=operation.name, line=0
        )
    frame, scope = instruction.source(), instruction.scope
    return Site(
        module=operation.module,
        layer=instruction.layer,
        direction=scope.direction,
        primitive=scope.primitive,
        opcodes=instruction.opcodes,
        category=category_of(operation),
        shapes=shapes.get(instruction.name, ()),
        file=PurePath(frame.file).name if frame else "",
        function=frame.function if frame else "",
        line=frame.line if frame else 0,
    )


def _shapes(program: Program) -> "Mapping[str, tuple[ArrayShape, ...]]":
    """Returns the shapes of the operands and results of each instruction by its name."""
    if program.module is None:
        return {}
    return {
        name: tuple(shape for each in (*computation.operands(instruction), instruction) for shape in each.shapes)
        for computation in program.module.computations.values()
        for name, instruction in computation.instructions.items()
    }
