"""Attribution of each instruction of a module to Python lines, in one pass over its graph.

An instruction without a line takes one from the first of these sources: the instructions it fuses, the nearest operand
(through operands without lines), the nearest user, the enclosing loop or call.
"""

from collections.abc import Iterator, Mapping, Sequence

from stack_profile.traces.hlo_module import Computation, RawInstruction, RawModule
from stack_profile.traces.instructions import Frame, Instruction, Origin, called_by

__all__ = ["attributed"]


def attributed(module: RawModule) -> dict[str, Instruction]:
    """Returns the instructions of a module by name, each with its Python lines."""
    return _Attribution(module).instructions()


_Donors = Mapping[int, RawInstruction]


class _Attribution:
    """Graph of a module, with the instructions that have lines."""

    def __init__(self, module: RawModule) -> None:
        self._stacks = module.stacks
        self._computations = {each.id: each for each in module.computations}
        self._raw = {raw.id: raw for each in module.computations for raw in each.instructions}
        self._home = {raw.id: each for each in module.computations for raw in each.instructions}
        self._located = {raw.id: raw for raw in self._raw.values() if self._frames(raw)}
        stacks = {raw.frame: self._frames(raw) for raw in self._located.values() if raw.source is None or raw.frame}
        self._outer = called_by(stacks.values(), next((each.op_name for each in self._located.values()), ""))
        self._callers: dict[int, RawInstruction] = {}
        for raw in self._raw.values():
            for called in raw.called:
                # A computation with several callers gets the lines of the first.
                self._callers.setdefault(called, raw)

    def instructions(self) -> dict[str, Instruction]:
        reads = {raw.id: [key for key in raw.operands if key in self._raw] for raw in self._raw.values()}
        readers: dict[int, list[int]] = {key: [] for key in reads}
        for key, operands in reads.items():
            for operand in operands:
                readers[operand].append(key)
        near: dict[Origin, _Donors] = {
            "operand": _nearest(self._located, reads, readers),
            "user": _nearest(self._located, readers, reads),
        }
        around = self._around()
        return {raw.name: self._instruction(raw, *self._donor(raw, near, around)) for raw in self._raw.values()}

    def _instruction(self, raw: RawInstruction, donor: RawInstruction | None, origin: Origin) -> Instruction:
        home = self._home[raw.id]
        caller = self._callers.get(home.id)
        inside = tuple(self._inside(raw))
        return Instruction(
            id=raw.id,
            name=raw.name,
            opcode=raw.opcode,
            computation=home.name,
            op_name=raw.op_name if donor is None else donor.op_name,
            frames=() if donor is None else self._frames(donor),
            outer=self._outer,
            origin=origin,
            fused=caller is not None and caller.opcode == "fusion",
            opcodes=frozenset(each.opcode for each in inside) or frozenset({raw.opcode}),
            parts=tuple(each.name for each in inside),
            target=raw.target,
            argument=raw.op_name if raw.opcode == "parameter" else "",
        )

    def _donor(
        self, raw: RawInstruction, near: Mapping[Origin, _Donors], around: _Donors
    ) -> tuple[RawInstruction | None, Origin]:
        if raw.id in self._located:
            return raw, "own"
        if fused := next((each for each in self._inside(raw) if each.id in self._located), None):
            return fused, "fused"
        for origin, donors in near.items():
            if raw.id in donors:
                return donors[raw.id], origin
        caller = around.get(self._home[raw.id].id)
        return caller, "none" if caller is None else "caller"

    def _frames(self, raw: RawInstruction) -> tuple[Frame, ...]:
        if 0 < raw.frame < len(self._stacks):
            return self._stacks[raw.frame]
        return () if raw.source is None else (raw.source,)

    def _inside(self, raw: RawInstruction) -> Iterator[RawInstruction]:
        """Yields the instructions of a fusion, the root first."""
        for called in raw.called if raw.opcode == "fusion" else ():
            if called in self._computations:
                # XLA writes operands before their users, so the root comes last.
                yield from reversed(self._computations[called].instructions)

    def _around(self) -> _Donors:
        """Returns for each computation the innermost enclosing loop or call that has lines."""
        found: dict[int, RawInstruction] = {}
        known: set[int] = set()
        for computation in self._computations.values():
            path: list[int] = []
            place: Computation | None = computation
            donor: RawInstruction | None = None
            while place is not None and place.id not in known:
                known.add(place.id)
                path.append(place.id)
                caller = self._callers.get(place.id)
                donor = self._located.get(caller.id) if caller else None
                place = self._home[caller.id] if caller and donor is None else None
            # The path ended at a computation that was visited before.
            donor = found.get(place.id) if place is not None else donor
            found |= dict.fromkeys(path, donor) if donor is not None else {}
        return found


def _nearest(
    located: _Donors, sources: Mapping[int, Sequence[int]], targets: Mapping[int, Sequence[int]]
) -> dict[int, RawInstruction]:
    """Returns for each instruction the nearest located one along `sources`, the first of several, itself if located.

    Breadth-first search from all located instructions; it visits each edge at most twice.

    Args:
      located: instructions that have lines, by id.
      sources: edges to follow, by id.
      targets: edges of `sources` reversed.
    """
    donors = dict(located)
    wave = list(donors)
    while wave:
        reached = dict.fromkeys(target for key in wave for target in targets[key] if target not in donors)
        found = {key: next(donors[source] for source in sources[key] if source in donors) for key in reached}
        donors |= found
        wave = list(found)
    return donors
