"""What a compiled program does on each device: FLOPs, bytes of main memory, collectives.

All three are read from the module that runs, after partitioning and fusion, so that work done twice, on every device or
again in the backward pass shows; loops count as often as they run.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stack_core.programs.flops import Flops, valid_pairs
from stack_core.programs.hlo import ArrayShape, Computation, Execution, Instruction, Module
from stack_core.programs.hlo_groups import first_group

__all__ = [
    "Collective",
    "InstructionCost",
    "collectives",
    "executed_flops",
    "instruction_costs",
    "instruction_flops",
    "memory_traffic",
    "uncounted_kernels",
]


@dataclass(frozen=True)
class Collective:
    """A collective instruction, as every device runs it.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
        "collective-broadcast".
      times: executions in one run of the program.
      loops: names of the loops around it, outermost first.
      arrays: those it makes, or for a reduce-scatter those it takes: the larger side. Of a ragged all-to-all, the
        smaller of what a device has and its buffer: more than that is not sent, taken over all devices.
      group: places in the program's list of devices that talk to each other, the first of several such groups.
      op_name: where the program asked for it.
      runner: the name of the instruction under which a device runs it, see `stack_core.programs.hlo.Execution`.
      is_gather: it is an all-reduce to which each device gives its part amid zeros, as TPUs run some gathers.
    """

    kind: str
    times: int
    loops: tuple[str, ...]
    arrays: tuple[ArrayShape, ...]
    group: tuple[int, ...]
    op_name: str
    runner: str
    is_gather: bool = False

    @property
    def array_bytes(self) -> int:
        """Of the larger side, one execution."""
        return sum(array.bytes for array in self.arrays)

    @property
    def sent_bytes(self) -> float:
        """What a device sends in one execution by the algorithm that sends least, a ring.

        With n devices: (n - 1) / n of the arrays to gather, scatter or exchange them; twice that to reduce them on all
        devices; all of them to permute.
        """
        size = len(self.group)
        factor = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(self.kind, (size - 1) / size)
        return factor * self.array_bytes


@dataclass(frozen=True)
class InstructionCost:
    """What one execution of an instruction does; a fusion's is that of all it fuses.

    Attributes:
      flops: as in `executed_flops`.
      traffic_bytes: as in `memory_traffic`.
      times: executions in one run of the program; None within a loop whose trips only its run decides.
    """

    flops: Flops
    traffic_bytes: int
    times: int | None


def instruction_costs(module: Module) -> dict[str, InstructionCost]:
    """The cost of every instruction that runs for itself, by name; those of a fusion are in the fusion's.

    What runs others, such as a loop, costs nothing beside them.
    """
    costs: dict[str, InstructionCost] = {}
    uncounted: set[str] = set()
    for execution in module.executions():
        instruction, name = execution.instruction, execution.instruction.name
        if execution.fused:
            continue
        if instruction.opcode == "while" and module.trips(instruction, execution.computation) is None:
            uncounted.add(name)
        known = uncounted.isdisjoint(execution.loops)
        flops = sum(_flops_inside(execution, module), Flops())
        cost = InstructionCost(flops, _traffic(execution, module), execution.times if known else None)
        if name in costs and known:  # a computation that is called from several places
            cost = InstructionCost(flops, cost.traffic_bytes, execution.times + (costs[name].times or 0))
        costs[name] = cost
    return costs


def _flops_inside(execution: Execution, module: Module) -> Iterator[Flops]:
    instruction = execution.instruction
    parts = [(instruction, execution.computation)]
    if instruction.operation == "fusion":
        parts += module.inside(instruction)
    yield from (instruction_flops(part, computation) for part, computation in parts if part.opcode in _FLOPS)


def instruction_flops(instruction: Instruction, computation: Computation) -> Flops:
    """FLOPs of one instruction by itself, as in `executed_flops`; what it fuses or calls is not its own."""
    count = _FLOPS.get(instruction.opcode)
    if count is None or not (done := count(instruction, computation)):
        return Flops()
    operand = computation.operands(instruction)[0].shapes[0]
    return Flops({_NUMPY_NAMES.get(operand.dtype, operand.dtype): done})


def executed_flops(module: Module) -> Flops:
    """FLOPs of the matrix products and convolutions that one device runs.

    Calls of libraries other than cuBLAS, and Pallas kernels, are in no sum: `uncounted_kernels` names them.
    """
    flops = Flops({}, tuple(f"loop {name}, counted once" for name in module.unknown_loops()))
    for execution in module.executions():
        if not execution.fused:
            flops = sum((part * execution.times for part in _flops_inside(execution, module)), flops)
    return flops


def uncounted_kernels(module: Module) -> tuple[str, ...]:
    """The names of kernels that run and whose FLOPs `executed_flops` does not know.

    A Mosaic kernel's own estimate is not taken: that of a grouped product is of all rows, in a group or not.
    """
    found = (execution.instruction for execution in module.executions())
    kernels = (each for each in found if each.opcode == "custom-call" and _KERNEL.search(each.attributes))
    return tuple(sorted({re.sub(r"[.\d]+$", "", kernel.name) for kernel in kernels}))


def memory_traffic(module: Module) -> int:
    """Bytes that one device reads from and writes to its main memory, caches left aside.

    Every instruction reads its operands and writes its result; a fusion does so once for all that is in it. Of an array
    that is only sliced or updated in place, only the part counts. Layouts that place an array in another memory space,
    such as a TPU's VMEM, are no traffic.
    """
    return sum(execution.times * _traffic(execution, module) for execution in module.executions())


def collectives(module: Module, device_count: int) -> tuple[Collective, ...]:
    """The collectives that run among more than one device, in the order of the module.

    Args:
      device_count: devices that the module was compiled for.
    """
    found = []
    for execution in module.executions():
        instruction, computation = execution.instruction, execution.computation
        kind = instruction.operation
        if kind not in _COLLECTIVES:
            continue
        group = first_group(instruction, device_count)
        operands = computation.operands(instruction)
        if execution.fused and {user.opcode for user in computation.users[instruction.name]} == {"dynamic-slice"}:
            kind = "reduce-scatter"  # which TPUs run as a fusion of an all-reduce and a slice of its result
        arrays = tuple(shape for operand in operands for shape in operand.shapes)
        if kind == "all-gather":
            arrays = _gathered(instruction, arrays, len(group))
        elif kind == "ragged-all-to-all":
            arrays = (min(arrays[:2], key=lambda array: array.bytes),)  # the others are tables of places and sizes
        if len(group) > 1:
            name, runner = instruction.op_name, execution.runner
            gathers = kind == "all-reduce" and _are_parts(operands, computation, module)
            found.append(Collective(kind, execution.times, execution.loops, arrays, group, name, runner, gathers))
    return tuple(found)


_COLLECTIVES: Final = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_NUMPY_NAMES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s4": "int4",
    "s8": "int8",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def _dot(instruction: Instruction, computation: Computation) -> int:
    left = computation.operands(instruction)[0].shapes[0]
    contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[axis] for axis in contracted)


def _library_product(instruction: Instruction, computation: Computation) -> int:
    """A product that became a call of cuBLAS, whose result comes with a workspace, or what a foreign function says."""
    said = re.search(r"\bflops = (\d+) : i64", instruction.attributes)
    if said is not None:
        return int(said[1])
    config = re.search(r"backend_config=(\{.*)", instruction.attributes)
    if '"__cublas$' not in instruction.attributes or config is None:
        return 0
    # What follows the config on the line is no JSON.
    gemm = json.JSONDecoder().raw_decode(config[1])[0]["gemm_backend_config"]
    left = computation.operands(instruction)[0].shapes[0]
    contracted = gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[int(axis)] for axis in contracted)


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """2 * batch * features out * features in of a group * what `valid_pairs` counts along every other axis.

    TPUs run matrix products as convolutions, batch axes as dilated spatial ones.
    """
    left, right = (operand.shapes[0].dims for operand in computation.operands(instruction)[:2])
    result = instruction.shapes[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, "every convolution has dim_labels"
    left_labels, right_labels, result_labels = labels.groups()
    spatial = sorted(label for label in result_labels if label.isdigit())
    window = _window(instruction.attributes, len(spatial))
    pairs = [
        valid_pairs(
            left[left_labels.index(label)],
            right[right_labels.index(label)],
            result[result_labels.index(label)],
            stride=window["stride"][axis],
            padding=window["pad"][axis],
            dilations=(window["lhs_dilate"][axis], window["rhs_dilate"][axis]),
        )
        for axis, label in enumerate(spatial)
    ]
    channels = result[result_labels.index("b")] * result[result_labels.index("f")] * right[right_labels.index("i")]
    return 2 * channels * math.prod(pairs)


_KERNEL: Final = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu|__gpu\$xla\.gpu\.triton|__cudnn)')
_FLOPS: Final = {"dot": _dot, "convolution": _convolution, "custom-call": _library_product}


def _window(attributes: str, axes: int) -> dict[str, list[int]]:
    """The window's stride, padding before, and dilations along every spatial axis."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    return {
        name: [int(value.split("_")[0]) for value in given.get(name, "x".join([default] * axes)).split("x") if value]
        for name, default in defaults.items()
    }


# Opcodes that move nothing: names for other results, control flow whose parts count for themselves, and the ends of
# what a start has counted.
_FREE: Final = frozenset({
    "after-all", "async", "bitcast", "call", "conditional", "constant", "get-dimension-size",
    "get-tuple-element", "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
})  # fmt: skip

_SLICES: Final = ("dynamic-slice", "slice", "gather")


def _traffic(execution: Execution, module: Module) -> int:
    instruction, computation = execution.instruction, execution.computation
    allocates = 'custom_call_target="AllocateBuffer"' in instruction.attributes
    ends = instruction.opcode.endswith(("-update", "-done"))
    if execution.fused or allocates or ends or instruction.operation in _FREE:
        return 0
    operands = computation.operands(instruction)
    if instruction.operation == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        pairs = zip(operands, inner.parameters, strict=True)
        return sum(_read(inner, parameter, operand) for operand, parameter in pairs) + _written(inner, inner.root)
    if instruction.opcode in _SLICES:
        return 2 * _main_memory(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _main_memory(operands[1].shapes)
    read, written = sum(_main_memory(operand.shapes) for operand in operands), _main_memory(instruction.shapes)
    if instruction.opcode == "copy-start":
        written = _main_memory(instruction.shapes[:1])
    elif instruction.opcode.endswith("-start"):  # The result repeats the operands beside what is made of them.
        written = written - read or written
    return read + written


def _main_memory(shapes: Iterable[ArrayShape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.memory_space == 0)


def _read(inner: Computation, parameter: Instruction, operand: Instruction) -> int:
    """Bytes of an operand that a fusion reads: all, or only the slices that it takes."""
    users = inner.users[parameter.name]
    parts = 0
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == parameter.name:
            parts += sum(shape.bytes for shape in user.shapes)
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name):
            return _main_memory(operand.shapes)
    return min(parts, _main_memory(operand.shapes))


def _written(inner: Computation, result: Instruction) -> int:
    """Bytes that a fusion writes: all of its results, or only what it updates of one."""
    if result.opcode == "tuple":
        return sum(_written(inner, operand) for operand in inner.operands(result))
    if result.opcode == "bitcast":
        source = inner.operands(result)[0]
        return _written(inner, source) if source.opcode == "dynamic-update-slice" else _main_memory(result.shapes)
    if result.opcode == "dynamic-update-slice" and _main_memory(result.shapes):
        return sum(shape.bytes for shape in inner.operands(result)[1].shapes)
    return _main_memory(result.shapes)


def _are_parts(operands: Iterable[Instruction], computation: Computation, module: Module) -> bool:
    """Whether each array of several numbers is one value everywhere but in the part that a device writes."""
    arrays = [operand for operand in operands if any(shape.dims for shape in operand.shapes)]
    return bool(arrays) and all(_is_part(array, computation, module) for array in arrays)


def _is_part(array: Instruction, computation: Computation, module: Module) -> bool:
    while array.opcode in ("bitcast", "copy", "copy-done", "copy-start", "convert"):
        (array,) = computation.operands(array)
    updated, around = array, computation
    if array.opcode == "fusion":
        around = module.computations[array.called("calls")[0]]
        updated = around.root
        while updated.opcode in ("bitcast", "convert"):
            (updated,) = around.operands(updated)
    if updated.opcode != "dynamic-update-slice":
        return False
    base = around.operands(updated)[0]
    if around is not computation and base.opcode == "parameter":
        base = computation.operands(array)[int(base.arguments)]
    return base.opcode == "broadcast"


def _gathered(instruction: Instruction, operands: tuple[ArrayShape, ...], size: int) -> tuple[ArrayShape, ...]:
    """The operands of an all-gather at the size to which they are gathered."""
    (axis,) = _numbers(r"dimensions=\{(\d+)\}", instruction.attributes)
    return tuple(
        ArrayShape(
            shape.dtype,
            (*shape.dims[:axis], shape.dims[axis] * size, *shape.dims[axis + 1 :]),
            shape.memory_space,
        )
        for shape in operands
    )


def _numbers(pattern: str, text: str) -> tuple[int, ...]:
    match = re.search(pattern, text)
    return tuple(int(number) for number in match[1].split(",") if number) if match else ()
