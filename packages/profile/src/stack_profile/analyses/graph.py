"""Neighbourhood of an instruction in its program: its operands, its users, and the contents of fusions.

Rows form a tree for the terminal that shows each instruction once; `operands` holds the edges of the graph. Tuples and
bitcasts pass values through and become edges. Constants are omitted, as is index arithmetic in fusions. FLOPs and bytes
are per execution, times are totals.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from stack_core.abi.errors import UnknownName, nearest
from stack_core.report.fields import number
from stack_profile.analyses.ops import chosen_devices
from stack_profile.answer import Answer
from stack_profile.errors import ProfileError
from stack_profile.traces.hlo import Program
from stack_profile.traces.operations import Operation, Ops
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.programs.hlo import ArrayShape, Computation, Instruction, Module
    from stack_core.programs.hlo_costs import InstructionCost

__all__ = ["GraphRow", "dot", "graph", "nodes_of"]


@dataclass(frozen=True)
class GraphRow:
    """An instruction.

    Attributes:
      tree: branch below the requested instruction, with the relation to its parent: "reads", "read by" or "fuses".
      name: name of the instruction.
      opcode: opcode; for a parameter followed by the name of the argument.
      shape: shape with its layout, the fastest axis first; for a tuple the number of arrays.
      result_bytes: size of the result.
      flops, traffic_bytes: costs of one execution; None if unknown, as for the bytes of fused instructions.
      self_s: self time on all devices; None for instructions without events of their own, such as fused ones.
      busy_share: `self_s` as a share of `busy_s`, the time in which any operation ran.
      occurrences: number of executions; None like `self_s`.
      line: Python line; "" if unknown.
      distance: number of edges to the requested instruction: negative for operands, positive for users.
      fusion: name of the fusion that contains the instruction; "" if it is not fused.
      operands: names of the operands; for a fused instruction, parameters are replaced by the fusion's operands.
    """

    tree: str
    name: str
    opcode: str
    shape: str
    result_bytes: int
    flops: int | None
    traffic_bytes: int | None
    self_s: float | None
    busy_share: float | None
    occurrences: int | None
    line: str
    distance: int
    fusion: str
    operands: tuple[str, ...]


def graph(
    trace: Trace,
    *,
    op: str | None = None,
    line: str | None = None,
    depth: int = 2,
    fusions: bool = True,
    device: str | None = None,
) -> Answer[GraphRow]:
    """Show an instruction's operands, its users, and the contents of fusions.

    Args:
      op: name of the instruction, such as fusion.3; by default the heaviest one.
      line: Python line on its stack instead, such as model.py:12; the heaviest instruction of the line is shown.
      depth: maximum distance of neighbours, in instructions.
      fusions: show the instructions inside fusions.
      device: one device instead of all of them.

    Raises:
      UnknownName: the instruction, the line or the device is unknown.
      ProfileError: `depth` is negative.
    """
    if depth < 0:
        raise ProfileError(f"depth is {depth}; it counts instructions, from 0 on.")
    devices = chosen_devices(trace, device)
    measured = _measured(devices)
    chosen = _chosen(trace, measured, op, line)
    if chosen is None:
        note = "No data: the trace has no operations whose program it holds and this version of XLA can read."
        return Answer("graph", {"devices": len(devices)}, GraphRow, (), (note, *trace.problems))
    busy_s = sum((each.busy_s for each in devices), 0.0)
    program, name = chosen
    nodes = _Nodes.of(program, {key[1]: took for key, took in measured.items() if key[0] == id(program)}, busy_s)
    rows = tuple(nodes.tree(name, depth, fusions=fusions))
    return Answer(
        name="graph",
        facts={
            "program": program.name,
            "instruction": name,
            "computation": nodes.home[name].name,
            "line": rows[0].line,
            "self_s": rows[0].self_s,
            "busy_s": busy_s,
            "instructions": len(rows),
        },
        row_type=GraphRow,
        rows=rows,
        notes=("FLOPs and bytes are of one execution, times of all; shares are of busy.", *trace.problems),
    )


def nodes_of(program: Program) -> Iterator[tuple[GraphRow, Sequence[str]]]:
    """Yields every instruction that `graph` may show and its users; the contents of fusions come without users.

    Times are None; a program that this version of XLA cannot read has no rows.
    """
    if program.module is None:
        return
    nodes = _Nodes.of(program, {}, 0.0)
    fused = {name for each in nodes.home for name in nodes.fused_computations(each)}
    names: dict[str, None] = {}
    for computation in program.module.computations.values():
        for name, instruction in computation.instructions.items() if computation.name not in fused else ():
            is_root = name == computation.root.name
            if _is_visible(instruction) and (is_root or instruction.opcode not in _PASSED):
                # Parts of a loop's state are operands, although other tuples pass values through.
                names |= dict.fromkeys((*nodes.reads(name), name, *nodes.readers(name)))
    for name in names:
        yield nodes.row(name, 0, ""), nodes.readers(name)
        yield from ((row, ()) for row in nodes.fused(name, 0))


def dot(answer: Answer[GraphRow]) -> Iterator[str]:
    """Formats the rows as a Graphviz graph, with fusions as boxes and darker nodes for more time."""
    yield 'digraph {\n  rankdir=TB; node [shape=box, style=filled, fontname="sans-serif"];\n'
    fused: dict[str, list[GraphRow]] = {}
    for row in answer.rows:
        fused.setdefault(row.fusion, []).append(row)
    names = {row.name for row in answer.rows}
    for place, (fusion, rows) in enumerate(fused.items()):
        if fusion:
            yield f"  subgraph cluster_{place} {{ label={_quoted(fusion)};\n"
        for row in rows:
            color = f'"0.05 {row.busy_share or 0.0:.2f} 1.00"'  # hue, saturation, value
            yield f"    {_quoted(row.name)} [label={_quoted(_caption(row))}, fillcolor={color}];\n"
        if fusion:
            yield "  }\n"
    for row in answer.rows:
        sources = [name for name in row.operands if name in names]
        yield "".join(f"  {_quoted(source)} -> {_quoted(row.name)};\n" for source in sources)
        if row.fusion and row is fused[row.fusion][-1]:
            yield f"  {_quoted(row.name)} -> {_quoted(row.fusion)} [style=dotted];\n"
    yield "}\n"


def _caption(row: GraphRow) -> str:
    took = f"\n{number('_s', row.self_s)}" if row.self_s is not None else ""
    return f"{row.name}\n{row.opcode} {row.shape}\n{row.line}{took}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@dataclass(frozen=True)
class _Took:
    operation: Operation
    self_s: float
    occurrences: int


def _measured(devices: Iterable[Ops]) -> Mapping[tuple[int, str], _Took]:
    """Returns self time and executions of each instruction on all devices, by program and name."""
    found: dict[tuple[int, str], _Took] = {}
    for each in devices:
        for operation, self_s, count in each.totals():
            if operation.program is not None and operation.instruction is not None:
                key = id(operation.program), operation.instruction.name
                before = found.get(key, _Took(operation, 0.0, 0))
                found[key] = _Took(operation, before.self_s + self_s, before.occurrences + count)
    return found


def _chosen(
    trace: Trace, measured: Mapping[tuple[int, str], _Took], op: str | None, line: str | None
) -> tuple[Program, str] | None:
    """Returns the program and the name of the requested instruction, or None without a readable program."""
    # By identity, because programs of different processes may share name and number.
    readable = {id(program): program for program in trace.ran if program.module is not None}
    if not readable:
        return None
    found = [(took.self_s, *key) for key, took in measured.items() if key[0] in readable]
    if op is not None:
        # Accepts a name as the analysis `ops` prints it, such as "jit_step: fusion.3".
        wanted = op.rpartition(": ")[2].removeprefix("%")
        found = [each for each in found if each[2] == wanted]
        # -1 s ranks instructions without events last.
        found += [(-1.0, key, wanted) for key, program in readable.items() if wanted in _names(program)]
        known = sorted({name for program in readable.values() for name in _names(program)})
        what, given = "instruction", op
    elif line is not None:
        lines = {key: _lines(took.operation) for key, took in measured.items()}
        # A suffix of the path is enough, but it must start at a folder.
        found = [each for each in found if any(name.endswith(f"/{line.lstrip('/')}") for name in lines[each[1:]])]
        known = sorted({name.rpartition("/")[2] for names in lines.values() for name in names})
        what, given = "operation of line", line
    else:
        # A loop's self time is its overhead, so the heaviest operation is usually more useful.
        found = [each for each in found if not measured[each[1], each[2]].operation.is_container] or found
        return (readable[max(found)[1]], max(found)[2]) if found else None
    if not found:
        raise UnknownName(f"The trace holds no {what} {given!r}.{nearest(given, known)} `ops` lists what ran.")
    return readable[max(found)[1]], max(found)[2]


def _lines(operation: Operation) -> list[str]:
    """Returns all lines on the stack of an operation, each after a slash."""
    return [f"/{frame}" for frame in operation.instruction.frames] if operation.instruction else []


def _names(program: Program) -> set[str]:
    computations = program.module.computations.values() if program.module else ()
    return {name for computation in computations for name in computation.instructions}


_PASSED: Final = frozenset({"get-tuple-element", "tuple", "bitcast", "opt-barrier"})
_LEFT_OUT: Final = frozenset({"constant", "iota", "partition-id", "replica-id", "after-all"})
_STATES: Final = ("parameter", "while")  # their results are tuples of unrelated values
# Integers of this size at most are index arithmetic.
_INDEX_BYTES: Final = 8
_INDICES: Final = ("s32", "u32", "s64", "u64", "pred")


@dataclass(frozen=True)
class _Nodes:
    """The instructions of a program, as rows of a tree.

    Attributes:
      program: the program, for lines and arguments.
      module: HLO module of the program.
      costs: costs of one execution by instruction.
      measured: measured times by instruction.
      busy_s: time in which any operation ran.
      home: computation of each instruction.
    """

    program: Program
    module: "Module"
    costs: "Mapping[str, InstructionCost]"
    measured: Mapping[str, _Took]
    busy_s: float
    home: "Mapping[str, Computation]"

    @classmethod
    def of(cls, program: Program, measured: Mapping[str, _Took], busy_s: float) -> "_Nodes":
        from stack_core.programs.hlo_costs import instruction_costs  # imports jax

        module = program.module
        assert module is not None, "programs that cannot be read are not chosen"
        home = {name: each for each in module.computations.values() for name in each.instructions}
        return cls(program, module, instruction_costs(module), measured, busy_s, home)

    def tree(self, name: str, depth: int, *, fusions: bool) -> Iterator[GraphRow]:
        """Yields the instruction and its neighbours, each below its nearest parent."""
        seen = {name}
        children: dict[str, list[tuple[str, int]]] = {}
        for sign, neighbours in ((-1, self.reads), (1, self.readers)):
            wave = [name]
            for distance in range(1, depth + 1):
                following: list[str] = []
                for parent in wave:
                    # The search goes in waves, so the first parent found is the nearest.
                    new = [each for each in neighbours(parent) if each not in seen]
                    seen.update(new)
                    children.setdefault(parent, []).extend((each, sign * distance) for each in new)
                    following += new
                wave = following
        yield from self._branch((name, 0), children, ("*", ""), fusions=fusions)

    def _branch(
        self,
        node: tuple[str, int],
        children: Mapping[str, list[tuple[str, int]]],
        indent: tuple[str, str],
        *,
        fusions: bool,
    ) -> Iterator[GraphRow]:
        """Yields the row of `node` (name, distance) and those below; `indent` is the tree's prefix of the two."""
        name, distance = node
        yield self.row(name, distance, indent[0])
        inside = self.fused(name, distance) if fusions else []
        below = children.get(name, [])
        for row in inside:
            last = row is inside[-1] and not below
            yield replace(row, tree=f"{indent[1]}{'└─ ' if last else '├─ '}fuses")
        for child in below:
            own, further = ("└─ ", "   ") if child is below[-1] else ("├─ ", "│  ")
            way = "reads" if child[1] < 0 else "read by"
            yield from self._branch(child, children, (f"{indent[1]}{own}{way}", indent[1] + further), fusions=fusions)

    def fused_computations(self, name: str) -> Sequence[str]:
        """Returns the computation inside of a fusion, and none for another instruction."""
        instruction = self.home[name].instructions[name]
        return instruction.called("calls") if instruction.operation == "fusion" else ()

    def reads(self, name: str) -> list[str]:
        """Returns an instruction's operands, through tuples and bitcasts; for loops and their states, single values."""
        found: dict[str, None] = {}
        home = self.home[name]
        for operand in home.operands(home.instructions[name]):
            is_part = any(each.opcode in _STATES for each in home.operands(operand))
            passed = self.reads(operand.name) if operand.opcode in _PASSED and not is_part else [operand.name]
            found.update(dict.fromkeys(each for each in passed if _is_visible(home.instructions[each])))
        return list(found)

    def readers(self, name: str) -> list[str]:
        """Returns an instruction's users, through tuples and bitcasts; a computation's root tuple is a user."""
        found: dict[str, None] = {}
        home = self.home[name]
        for user in home.users[name]:
            passed = user.opcode in _PASSED and user.name != home.root.name
            found.update(dict.fromkeys(self.readers(user.name) if passed else [user.name]))
        return list(found)

    def row(self, name: str, distance: int, tree: str) -> GraphRow:
        instruction, known = self.home[name].instructions[name], self.program.instructions.get(name)
        took, cost = self.measured.get(name), self.costs.get(name)
        source = known.source() if known else None
        argument = f" {known.argument}" if known and known.argument else ""
        return GraphRow(
            tree=tree,
            name=name,
            opcode=instruction.opcode + argument,
            shape=_shape(instruction.shapes),
            result_bytes=sum(shape.bytes for shape in instruction.shapes),
            flops=cost.flops.total if cost else None,
            traffic_bytes=cost.traffic_bytes if cost else None,
            self_s=took.self_s if took else None,
            busy_share=took.self_s / self.busy_s if took and self.busy_s else None,
            occurrences=took.occurrences if took else None,
            line=str(source) if source else "",
            distance=distance,
            fusion="",
            operands=tuple(self.reads(name)),
        )

    def fused(self, name: str, distance: int) -> list[GraphRow]:
        """Returns a fusion's instructions in program order, without constants, indices and bitcasts."""
        from stack_core.programs.hlo_costs import instruction_flops  # imports jax

        fusion = self.home[name].instructions[name]
        if fusion.operation != "fusion":
            return []
        outside = dict(zip(self._parameters(fusion), self.home[name].operands(fusion), strict=False))
        rows = []
        for part, computation in self.module.inside(fusion):
            row = self.row(part.name, distance, "")
            is_index = row.result_bytes <= _INDEX_BYTES and part.shapes[0].dtype in _INDICES
            # A broadcast constant, which has lost its operand with the constants.
            is_filled = part.opcode == "broadcast" and not row.operands
            if not (part.opcode in _PASSED | _LEFT_OUT | {"parameter"} or is_index or is_filled):
                operands = [operand for each in row.operands for operand in self._outside(each, outside)]
                flops = instruction_flops(part, computation).total
                rows.append(replace(row, fusion=name, flops=flops, operands=tuple(dict.fromkeys(operands))))
        return rows

    def _parameters(self, fusion: "Instruction") -> tuple[str, ...]:
        (called,) = fusion.called("calls")
        return tuple(parameter.name for parameter in self.module.computations[called].parameters)

    def _outside(self, name: str, outside: "Mapping[str, Instruction]") -> list[str]:
        """Replaces a parameter inside a fusion by the fusion's operand; returns other names unchanged."""
        if name not in outside:
            return [name]
        operand = outside[name]
        return self.reads(operand.name) if operand.opcode in _PASSED else [operand.name]


def _is_visible(instruction: "Instruction") -> bool:
    """True for instructions to show: not constants, nor a loop's state tuple, whose parts are shown instead."""
    is_state = instruction.opcode == "parameter" and len(instruction.shapes) != 1
    return instruction.opcode not in _LEFT_OUT and not is_state


def _shape(shapes: "Sequence[ArrayShape]") -> str:
    if len(shapes) != 1:
        return f"{len(shapes)} arrays"
    layout = f"{{{shapes[0].layout}}}" if shapes[0].layout else ""
    return f"{shapes[0].dtype}[{','.join(map(str, shapes[0].dims))}]{layout}"
