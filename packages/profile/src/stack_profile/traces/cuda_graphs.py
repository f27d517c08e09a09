"""Joins the kernels of CUDA graphs with the instructions of a program.

Events of such kernels name the command buffer ("command_buffer_14") instead of the instruction, and their program's
number is often 0, or that of another process. The name of the module and the kernels identify the program.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from stack_profile.traces.hlo import Program
from stack_profile.traces.xplane import MISSING

__all__ = ["Kind", "join_graphs"]

_FIT: Final = 0.9  # a graph is of a program if this share of its kernels matches
_GRAPH_BITS: Final = 32  # the upper half of a node's number is the number of its graph


class Kind(NamedTuple):
    """Common properties of all executions of an operation.

    Attributes:
      beside: True for an operation without a program, such as a copy.
      key, module: number and name of the program in events; `MISSING` and "" if absent.
      name: name of the operation; of a kernel in a CUDA graph, the name of its command buffer.
      kernel: name of the kernel or copy on a GPU; "" on other devices.
      node: number of the node in a CUDA graph; `MISSING` outside of graphs.
      instruction: id of the instruction; in a CUDA graph, of the loop or call around the command buffer. `MISSING` if
        absent.
      offset_ps: earliest start since the graph was launched; 0 outside of graphs.
    """

    beside: bool
    key: int
    module: str
    name: str
    kernel: str = ""
    node: int = MISSING
    instruction: int = MISSING
    offset_ps: int = 0

    @property
    def in_graph(self) -> bool:
        return self.node != MISSING


@dataclass(frozen=True)
class _Graph:
    """A CUDA graph, with its kernels in their order of execution."""

    number: int
    kinds: tuple[Kind, ...]


def join_graphs(
    kinds: Sequence[Kind], programs: Sequence[Program], numbered: Program | None = None
) -> tuple[dict[Kind, tuple[Program, str]], list[str]]:
    """Finds the program and the instruction of kernels.

    Several programs with one name, such as one function compiled for several shapes, may have run under one number.
    Each graph then belongs to the program with the most matching kernels.

    Args:
      kinds: kernels with a common number and module, inside and outside of graphs.
      programs: candidates; programs with this module's name.
      numbered: the program with this number, which may be another process's; used first if its kernels match.

    Returns:
      The program and the name of the instruction of matching kernels; and messages about kernels that could belong to
      several programs.
    """
    found: dict[Kind, tuple[Program, str]] = {}
    problems: list[str] = []
    graphs, candidates = _graphs(kinds), list(programs)
    single = [kind for kind in kinds if not kind.in_graph]
    first = [program for program in candidates if program is numbered]
    while graphs and candidates:
        fits = [_Fit.of(program, graphs, single) for program in first or candidates if not program.damage]
        is_trusted = not first or any(fit.is_good for fit in fits)
        first.clear()
        if not is_trusted:
            continue
        if not fits:
            break
        best = max(fits, key=lambda fit: fit.rank)
        if not best.rows:
            break
        equal = [fit for fit in fits if fit.rank == best.rank and set(fit.graphs) & set(best.graphs)]
        if not _alike(equal):
            problems.append(
                f"{len(equal)} programs named {best.program.name} fit {len(best.rows):,} kernels of CUDA graphs "
                "equally well and differ in their lines, so these kernels are left without lines."
            )
            graphs = [graph for graph in graphs if graph not in best.graphs]
            continue
        found |= best.matches()
        graphs = [graph for graph in graphs if graph not in best.graphs]
        candidates = [program for program in candidates if program is not best.program]
    chosen = list({id(program): program for program, _ in found.values()}.values())
    for kind in single:
        if program := next((each for each in chosen if _is_in(kind, each)), None):
            found[kind] = program, kind.name.removeprefix("%")
    return found, problems


def _graphs(kinds: Sequence[Kind]) -> list[_Graph]:
    """Returns the graphs in the order of the program: XLA numbers command buffers in this order."""
    members: dict[tuple[int, str], list[Kind]] = {}
    for kind in kinds:
        if kind.in_graph:
            members.setdefault((kind.node >> _GRAPH_BITS, kind.name), []).append(kind)
    graphs = [
        _Graph(int(match[1]) if (match := _NUMBER.search(name)) else 0, tuple(sorted(each, key=_start)))
        for (_, name), each in members.items()
    ]
    return sorted(graphs, key=lambda graph: graph.number)


_NUMBER: Final = re.compile(r"(\d+)$")


def _start(kind: Kind) -> tuple[int, int]:
    return kind.offset_ps, kind.node


def _is_in(kind: Kind, program: Program) -> bool:
    instruction = program.instructions.get(kind.name.removeprefix("%"))
    return instruction is not None and kind.instruction in (MISSING, instruction.id)


@dataclass(frozen=True)
class _Fit:
    """Match of graphs with a program.

    Attributes:
      program: the program.
      graphs: graphs of the program.
      rows: row of the program's launches for each kernel of these graphs, -1 without a match.
      rank: quality of the match; of two fits, the larger is better.
    """

    program: Program
    graphs: tuple[_Graph, ...]
    rows: Mapping[Kind, int]
    rank: tuple[int, int, int, int]

    @classmethod
    def of(cls, program: Program, graphs: Sequence[_Graph], single: Sequence[Kind]) -> "_Fit":
        # Several graphs with one number are of several programs, or a graph that XLA made again.
        numbers: dict[int, list[_Graph]] = {}
        for graph in graphs:
            numbers.setdefault(graph.number, []).append(graph)
        first = [
            max(each, key=lambda graph: _matched(program, graph)) if each[1:] else each[0] for each in numbers.values()
        ]
        rows = _aligned(program, [kind for graph in first for kind in graph.kinds])
        for graph in graphs:
            if graph not in first:
                rows |= _aligned(program, graph.kinds, _extent(rows, numbers[graph.number]))
        fitting = [graph for graph in graphs if _share(rows, graph) >= _FIT]
        # Without a graph that fits, the program may still be the best one.
        chosen = tuple(fitting or graphs)
        kept = {kind: rows[kind] for graph in chosen for kind in graph.kinds if rows[kind] >= 0}
        unused = len(program.launches) - len(set(kept.values()))
        others = sum(_is_in(kind, program) for kind in single)
        return cls(program, chosen, kept, (len(kept) if fitting else 0, len(kept), others, -unused))

    @property
    def is_good(self) -> bool:
        """True if a graph fits."""
        return self.rank[0] > 0

    def matches(self) -> dict[Kind, tuple[Program, str]]:
        names = self.program.launches.names
        return {kind: (self.program, names[row]) for kind, row in self.rows.items()}


def _matched(program: Program, graph: _Graph) -> int:
    return sum(row >= 0 for row in _aligned(program, graph.kinds).values())


def _share(rows: Mapping[Kind, int], graph: _Graph) -> float:
    return sum(rows[kind] >= 0 for kind in graph.kinds) / len(graph.kinds)


def _extent(rows: Mapping[Kind, int], graphs: Sequence[_Graph]) -> tuple[int, int] | None:
    known = [rows[kind] for graph in graphs for kind in graph.kinds if rows.get(kind, -1) >= 0]
    return (min(known), max(known) + 1) if known else None


def _aligned(program: Program, kinds: Sequence[Kind], extent: tuple[int, int] | None = None) -> dict[Kind, int]:
    launches = program.launches
    whole = extent or (0, len(launches))
    within = [whole if extent else launches.bodies.get(kind.instruction, whole) for kind in kinds]
    ranks: dict[int, int] = {}
    rank = [ranks.setdefault(kind.node >> _GRAPH_BITS, len(ranks)) for kind in kinds]
    # Parallel branches of a graph start in any order, while nodes have the order of the program.
    orders = [np.arange(len(kinds)), np.lexsort(([kind.node for kind in kinds], rank))]
    best: np.ndarray | None = None
    for order in orders:
        rows = np.full(len(kinds), -1)
        places = order.tolist()
        rows[order] = launches.align([kinds[each].kernel for each in places], [within[each] for each in places])
        if best is None or (rows >= 0).sum() > (best >= 0).sum():
            best = rows
        if (best >= 0).all():
            break
    return dict(zip(kinds, (best if best is not None else np.full(len(kinds), -1)).tolist(), strict=True))


def _alike(fits: Sequence[_Fit]) -> bool:
    """Returns whether all kernels have the same lines and scopes in all programs."""
    if len(fits) == 1:
        return True
    places = set()
    for fit in fits:
        instructions = fit.program.instructions
        matches = sorted(fit.matches().items())
        places.add(tuple((kind, instructions[name].op_name, instructions[name].frames) for kind, (_, name) in matches))
    return len(places) == 1
