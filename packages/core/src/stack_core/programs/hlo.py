"""Parser for compiled HLO text, with the number of executions of each instruction.

XLA prints a compiled module as computations with one instruction per line. Its own cost analysis counts the body of a
loop once; here the executions of an instruction include the trips of all enclosing loops.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from stack_core.abi.errors import HardwareError

__all__ = ["ArrayShape", "Computation", "Execution", "Instruction", "Module", "parse_hlo"]


@dataclass(frozen=True)
class ArrayShape:
    """Dtype, dimensions and layout of one array.

    Attributes:
      dtype: HLO name of the dtype: "bf16", "s8", "pred".
      dims: size of each axis.
      memory_space: 0 for the device's main memory; the meaning of other numbers depends on the backend.
      layout: HLO layout string such as "1,0:T(8,128)", the fastest axis first; ignored by comparisons.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0
    layout: str = field(default="", compare=False, repr=False)

    @property
    def bytes(self) -> int:
        """Size without the padding of a tiled layout; 0 for tokens and opaque values."""
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction (one line) of a computation.

    Attributes:
      name: unique name within the module.
      opcode: HLO opcode, such as "fusion" or "all-gather-start".
      shapes: arrays of the result; nested tuples are flattened in order.
      operands: names of instructions of the same computation.
      arguments: text between the parentheses: the operands, or a constant's value.
      attributes: text after the parentheses.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @property
    def operation(self) -> str:
        """Opcode without the suffix "-start", which marks instructions that run asynchronously."""
        return self.opcode.removesuffix("-start")

    @property
    def op_name(self) -> str:
        """Location in the traced program, such as "jit(step)/while/body/dot_general", or ""."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def called(self, *attributes: str) -> tuple[str, ...]:
        """Returns the names of the computations in attributes such as "calls" or "body"."""
        names: list[str] = []
        for attribute in attributes:
            for single, several in re.findall(rf"\b{attribute}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes):
                names += [single] if single else re.findall(r"%([\w.\-]+)", several)
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A function of the module.

    Attributes:
      name: unique name within the module.
      instructions: instructions by name, in program order.
      root: instruction whose result the function returns.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(self.instructions[name] for name in instruction.operands)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameter instructions in the order of the arguments."""
        found = [instruction for instruction in self.instructions.values() if instruction.opcode == "parameter"]
        return tuple(sorted(found, key=lambda instruction: int(instruction.arguments)))

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instructions that read each result, by the result's name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            # An instruction that reads a result twice is one user.
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {name: tuple(found) for name, found in users.items()}

    def constant(self, name: str) -> int | None:
        """Returns the value of an integer constant, looking through copies; None for any other instruction."""
        instruction = self.instructions[name]
        while instruction.opcode in _COPIES:
            instruction = self.instructions[instruction.operands[0]]
        is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.arguments)
        return int(instruction.arguments) if is_number else None


@dataclass(frozen=True)
class Execution:
    """An executed instruction and its surroundings.

    Attributes:
      instruction: executed instruction.
      computation: computation that contains the instruction.
      times: executions in one run of the module.
      loops: names of the enclosing while instructions, outermost first.
      fused: whether the instruction is part of a fusion.
      runner: name under which a device runs it: its own, or the name of the enclosing fusion or asynchronous call.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[str, ...]
    fused: bool
    runner: str


@dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      computations: computations by name.
      entry: computation that a run of the module executes.
    """

    computations: Mapping[str, Computation]
    entry: Computation

    def executions(self, weigh: Callable[[Execution], float] | None = None) -> Iterator[Execution]:
        """Yields all instructions that run.

        A loop of unknown trip count counts as one trip.

        Args:
          weigh: cost of an execution, by which the heaviest branch of a conditional counts as taken; by default every
            branch does.
        """
        yield from self._executions(self.entry, 1, (), fused=False, weigh=weigh)

    def inside(self, fusion: Instruction) -> list[tuple[Instruction, Computation]]:
        """Returns the instructions in a fusion, nested fusions included, each with its computation."""
        inner = [
            execution
            for name in fusion.called(*_CALLS["fusion"])
            for execution in self._executions(self.computations[name], 1, (), fused=True)
        ]
        return [(execution.instruction, execution.computation) for execution in inner]

    def unknown_loops(self) -> tuple[str, ...]:
        """Returns the loops whose trip count is only known at run time, by their `op_name` (or name)."""
        return tuple(
            execution.instruction.op_name or execution.instruction.name
            for execution in self.executions()
            if execution.instruction.opcode == "while"
            and self.trips(execution.instruction, execution.computation) is None
        )

    def trips(self, loop: Instruction, computation: Computation) -> int | None:
        """Returns the trip count of a while instruction of `computation`; None when only the run decides.

        XLA annotates the count on CPUs and GPUs. Otherwise the count is derived from a counter that starts at a
        constant, is compared with a constant and grows by a constant.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        (condition,), (body,) = loop.called("condition"), loop.called("body")
        bound = _bound(self.computations[condition])
        if bound is None:
            return None
        counter, last = bound
        start = _element(computation, computation.operands(loop)[0], counter)
        first = None if start is None else computation.constant(start.name)
        step = _step(self.computations[body], counter)
        return None if first is None or step is None else max(0, -(-(last - first) // step))  # rounded up

    def _executions(
        self,
        computation: Computation,
        times: int,
        loops: tuple[str, ...],
        *,
        fused: bool,
        runner: str = "",
        weigh: Callable[[Execution], float] | None = None,
    ) -> Iterator[Execution]:
        for instruction in computation.instructions.values():
            yield Execution(instruction, computation, times, loops, fused, runner or instruction.name)
            inner_times, inner_loops = times, loops
            if instruction.opcode == "while":
                trips = self.trips(instruction, computation)
                inner_times, inner_loops = times * (1 if trips is None else trips), (*loops, instruction.name)
            is_fusion = instruction.operation == "fusion"
            around = runner or (instruction.name if is_fusion or instruction.opcode.endswith("-start") else "")
            branches = [
                self._executions(
                    self.computations[name],
                    inner_times,
                    inner_loops,
                    fused=fused or is_fusion,
                    runner=around,
                    weigh=weigh,
                )
                for name in instruction.called(*_CALLS.get(instruction.operation, ()))
            ]
            if weigh is not None and instruction.opcode == "conditional":
                yield from max(map(list, branches), key=lambda branch: sum(map(weigh, branch)), default=[])
            else:
                for branch in branches:
                    yield from branch


def parse_hlo(text: str) -> Module:
    """Parses the text of a compiled module, such as `compiled.as_text()`.

    Raises:
      HardwareError: the text has no entry computation, so it is not HLO of the form that this version of JAX prints.
    """
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    name, entry, root = "", None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, root = header["name"], None
            instructions = {}
            entry = name if header["entry"] else entry
        elif line.startswith("}") and root is not None:
            computations[name] = Computation(name, instructions, root)
        elif line.startswith("  ") and name and (instruction := _instruction(line)) is not None:
            instructions[instruction.name] = instruction
            root = instruction if line.lstrip().startswith("ROOT ") else root
    if entry is None or entry not in computations:
        raise HardwareError(
            f"The text is not compiled HLO: it starts with {text[:60]!r} and has no entry computation. Pass the result "
            "of `jax.jit(...).lower(...).compile().as_text()`."
        )
    return Module(computations, computations[entry])


# Lines such as
#   ENTRY %main.5 (param.1: f32[8,16]) -> f32[8] {
#     ROOT %fusion.2 = bf16[8,16]{1,0:T(8,128)S(1)} fusion(%param.1), kind=kLoop, calls=%fused_computation
_HEADER: Final = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_NAME: Final = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_OPCODE: Final = re.compile(r"\s*([\w\-]+)\(")

_COPIES: Final = ("copy", "copy-start", "copy-done", "convert", "bitcast", "reshape")

# Without the `to_apply` of reductions and sorts, which runs for each element.
_CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async": ("calls",),
    "custom-call": ("called_computations",),
    "while": ("body",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


@functools.cache
def _bits(dtype: str) -> int:
    # XLA stores a predicate in a byte.
    if dtype == "pred":
        return 8
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 0


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    # The shape of a tuple contains spaces and parentheses itself.
    shape_end = _closing(line, match.end()) if line[match.end()] == "(" else line.index(" ", match.end())
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : end - 1]
    return Instruction(
        name=match["name"],
        opcode=opcode[1],
        shapes=_shapes(line[match.end() : shape_end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        attributes=line[end:],
    )


def _closing(line: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


def _shapes(text: str) -> tuple[ArrayShape, ...]:
    shapes = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size) for size in re.findall(r"\d+", dims))
        shapes.append(ArrayShape(dtype, sizes, int(space[1]) if space else 0, layout))
    return tuple(shapes)


def _bound(condition: Computation) -> tuple[int, int] | None:
    """Returns (index of the counter in the loop state, bound) of a condition `state[counter] < bound`, or None."""
    root = condition.root
    # JAX's counted loops ascend and compare by LT.
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, bound = condition.operands(root)
    last = condition.constant(bound.name)
    place = _place(condition, counter)
    return None if last is None or place is None else (place, last)


def _place(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the index of a value in the computation's tuple parameter, looking through copies, or None."""
    while instruction.opcode in _COPIES:
        instruction = computation.operands(instruction)[0]
    if instruction.opcode != "get-tuple-element":
        return None
    index = re.search(r"index=(\d+)", instruction.attributes)
    return int(index[1]) if index and computation.operands(instruction)[0].opcode == "parameter" else None


def _element(computation: Computation, state: Instruction, index: int) -> Instruction | None:
    return computation.operands(state)[index] if state.opcode == "tuple" else None


def _step(body: Computation, counter: int) -> int | None:
    """Returns the positive constant that one trip adds to the counter; None for any other update."""
    value = _element(body, body.root, counter)
    while value is not None and value.opcode in _COPIES:
        value = body.operands(value)[0]
    if value is None or value.opcode != "add":
        return None
    operands = body.operands(value)
    steps = [body.constant(operand.name) for operand in operands]
    if counter not in [_place(body, operand) for operand in operands]:
        return None
    return next((step for step in steps if step is not None and step > 0), None)
