"""Per-device costs of a compiled program: FLOPs, main-memory traffic and collectives.

All three are read from the compiled module, after partitioning and fusion. They therefore include work that is
replicated on every device or recomputed in the backward pass. Loop bodies count once per trip.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stack_core.programs.flops import Flops, valid_pairs
from stack_core.programs.hlo import ArrayShape, Computation, Execution, Instruction, Module
from stack_core.programs.hlo_groups import device_groups

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
    """A collective instruction, as executed by every device.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
        "collective-broadcast".
      times: executions in one run of the program.
      loops: names of the enclosing loops, outermost first.
      arrays: arrays of the larger side: the operands of a reduce-scatter, otherwise the results. For a ragged
        all-to-all, the smaller of a device's operand and its output buffer; the average of the bytes sent by a device
        exceeds neither.
      group: positions in the program's list of devices that communicate with each other, for the first of several such
        groups. Between TPU slices, a number per device instead, which only counts them.
      op_name: source location in the traced program.
      runner: name of the instruction under which a device runs it, see `stack_core.programs.hlo.Execution`.
      is_gather: True for an all-reduce of zero-padded parts: TPUs run some gathers in this way.
      between_slices: whether devices of several slices communicate.
      groups: all groups, and for a collective-permute all pairs of source and target; empty between TPU slices.
    """

    kind: str
    times: int
    loops: tuple[str, ...]
    arrays: tuple[ArrayShape, ...]
    group: tuple[int, ...]
    op_name: str
    runner: str
    is_gather: bool = False
    between_slices: bool = False
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def array_bytes(self) -> int:
        """Size of the larger side in one execution."""
        return sum(array.bytes for array in self.arrays)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in one execution with a ring algorithm, which sends the least.

        With n devices: (n - 1) / n of the arrays to gather, scatter or exchange them, twice that to reduce them on all
        devices, and all of them to permute.
        """
        size = len(self.group)
        factor = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(self.kind, (size - 1) / size)
        return factor * self.array_bytes


@dataclass(frozen=True)
class InstructionCost:
    """Cost of one execution of an instruction; the cost of a fusion includes all fused instructions.

    Attributes:
      flops: FLOPs as in `executed_flops`.
      traffic_bytes: main-memory traffic as in `memory_traffic`.
      times: executions in one run of the program; None within a loop of unknown trip count.
    """

    flops: Flops
    traffic_bytes: int
    times: int | None


def instruction_costs(module: Module) -> dict[str, InstructionCost]:
    """Computes the cost of every instruction outside of fusions, by name.

    Instructions that only run others, such as loops, cost nothing themselves.
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
        if name in costs and known:  # its computation is called from several places
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
    """Counts the FLOPs of one instruction as in `executed_flops`, without the instructions that it fuses or calls."""
    count = _FLOPS.get(instruction.opcode)
    if count is None or not (done := count(instruction, computation)):
        return Flops()
    operand = computation.operands(instruction)[0].shapes[0]
    return Flops({_NUMPY_NAMES.get(operand.dtype, operand.dtype): done})


def executed_flops(module: Module) -> Flops:
    """Counts the FLOPs of the matrix products and convolutions that one device runs.

    Library calls count if they are calls of cuBLAS or have an attribute `flops`. Pallas kernels and cuDNN calls do not;
    `uncounted_kernels` lists their names. Of a conditional, the branch with the most FLOPs counts.
    """
    flops = Flops({}, tuple(f"loop {name}, counted once" for name in module.unknown_loops()))

    def executed(execution: Execution) -> Flops:
        parts = () if execution.fused else _flops_inside(execution, module)
        return sum((part * execution.times for part in parts), Flops())

    return sum(map(executed, module.executions(lambda execution: executed(execution).total)), flops)


def uncounted_kernels(module: Module) -> tuple[str, ...]:
    """Returns the names of executed kernels whose FLOPs `executed_flops` does not count.

    A Mosaic kernel's own estimate is not used: the estimate of a grouped product covers all rows, in a group or not.
    """
    found = (execution.instruction for execution in module.executions())
    kernels = (each for each in found if each.opcode == "custom-call" and _KERNEL.search(each.attributes))
    return tuple(sorted({re.sub(r"[.\d]+$", "", kernel.name) for kernel in kernels}))


def memory_traffic(module: Module) -> int:
    """Computes the bytes that one device reads from and writes to its main memory, without regard to caches.

    Every instruction reads its operands and writes its result; a fusion does so once for all its parts. If an array is
    only sliced or updated in place, only that part counts. Arrays whose layout places them in another memory space,
    such as a TPU's VMEM, do not count. Of a conditional, the branch with the most traffic counts.
    """

    def traffic(execution: Execution) -> int:
        return execution.times * _traffic(execution, module)

    return sum(map(traffic, module.executions(traffic)))


def collectives(module: Module, device_count: int, slice_of: Sequence[int] = ()) -> tuple[Collective, ...]:
    """Returns the collectives that run among more than one device, in the order of the module.

    Args:
      device_count: number of devices in the compiled module, or in one TPU slice if it has several.
      slice_of: slice of each device; empty for a single slice.
    """
    found = []
    for execution in module.executions():
        instruction, computation = execution.instruction, execution.computation
        kind = instruction.operation
        if transfer := _slice_transfer(execution):
            found.append(transfer)
        if kind not in _COLLECTIVES:
            continue
        groups = device_groups(instruction, device_count)
        # A device may permute to itself.
        group = tuple(sorted(set(groups[0]))) if kind == "collective-permute" else groups[0]
        operands = computation.operands(instruction)
        if execution.fused and {user.opcode for user in computation.users[instruction.name]} == {"dynamic-slice"}:
            kind = "reduce-scatter"  # TPUs run it as a fusion of an all-reduce and a slice of its result.
        arrays = tuple(shape for operand in operands for shape in operand.shapes)
        if kind == "all-gather":
            arrays = _gathered(instruction, arrays, len(group))
        elif kind == "ragged-all-to-all":
            arrays = (min(arrays[:2], key=lambda array: array.bytes),)  # later operands are offsets and sizes
        if len(group) > 1:
            name, runner = instruction.op_name, execution.runner
            gathers = kind == "all-reduce" and _are_parts(operands, computation, module)
            between = len({slice_of[place] for place in group}) > 1 if slice_of else False
            counts = (execution.times, execution.loops)
            found.append(Collective(kind, *counts, arrays, group, name, runner, gathers, between, groups))
    return tuple(found)


def _slice_transfer(execution: Execution) -> Collective | None:
    """Returns the part of a collective that goes between TPU slices, or None for other instructions.

    The TPU compiler divides a collective over several slices: the part within a slice keeps its instruction, with
    devices numbered within the slice, and the part between slices becomes a send to and a receive from the host.
    """
    instruction = execution.instruction
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    # Of the pair, the instruction with the larger array.
    if kind is None or instruction.opcode != ("send" if kind[1] == "REDUCE_SCATTER" else "recv"):
        return None
    target = re.search(r'_xla_megascale_target="?\{\{?([\d,]+)', instruction.attributes)
    devices = len(target[1].split(",")) if target else 2
    return Collective(
        kind={"ONE_TO_ONE": "collective-permute"}.get(kind[1], kind[1].lower().replace("_", "-")),
        times=execution.times,
        loops=execution.loops,
        arrays=instruction.shapes[:1],
        group=tuple(range(max(devices, 2))),
        op_name=instruction.op_name,
        runner=execution.runner,
        between_slices=True,
    )


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
    """Counts the FLOPs of a cuBLAS call, or reads the attribute `flops` of a foreign function; 0 for other calls."""
    said = re.search(r"\bflops = (\d+) : i64", instruction.attributes)
    if said is not None:
        return int(said[1])
    config = re.search(r"backend_config=(\{.*)", instruction.attributes)
    if '"__cublas$' not in instruction.attributes or config is None:
        return 0
    # The rest of the line after the config is not JSON.
    gemm = json.JSONDecoder().raw_decode(config[1])[0]["gemm_backend_config"]
    left = computation.operands(instruction)[0].shapes[0]
    contracted = gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    # shapes[0] is the product; the result of a cuBLAS call also includes a workspace.
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[int(axis)] for axis in contracted)


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """Counts 2 * batch * output features * input features per group * `valid_pairs` of every spatial axis.

    TPUs run matrix products as convolutions, with batch axes as dilated spatial axes.
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
    """Parses the window's strides, leading padding and dilations along every spatial axis."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    return {
        name: [int(value.split("_")[0]) for value in given.get(name, "x".join([default] * axes)).split("x") if value]
        for name, default in defaults.items()
    }


# Opcodes that move nothing: aliases of other results, constants, and calls and control flow, whose parts count
# separately.
_FREE: Final = frozenset({
    "after-all", "async", "bitcast", "call", "conditional", "constant", "get-dimension-size",
    "get-tuple-element", "iota", "opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
})  # fmt: skip

_SLICES: Final = ("dynamic-slice", "slice", "gather")


def _traffic(execution: Execution, module: Module) -> int:
    instruction, computation = execution.instruction, execution.computation
    allocates = 'custom_call_target="AllocateBuffer"' in instruction.attributes
    # The traffic of an asynchronous instruction counts at its start.
    ends = instruction.opcode.endswith(("-update", "-done"))
    if execution.fused or allocates or ends or instruction.operation in _FREE:
        return 0
    operands = computation.operands(instruction)
    if instruction.operation == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        pairs = zip(operands, inner.parameters, strict=True)
        return sum(_read(inner, parameter, operand) for operand, parameter in pairs) + _written(inner, inner.root)
    # Only the slice is read, and written once.
    if instruction.opcode in _SLICES:
        return 2 * _main_memory(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _main_memory(operands[1].shapes)
    read, written = sum(_main_memory(operand.shapes) for operand in operands), _main_memory(instruction.shapes)
    if instruction.opcode == "copy-start":
        # The result of a copy-start also contains the source and a context.
        written = _main_memory(instruction.shapes[:1])
    elif instruction.opcode.endswith("-start"):  # Its result usually includes the operands, which are not written.
        written = written - read or written
    return read + written


def _main_memory(shapes: Iterable[ArrayShape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.memory_space == 0)


def _read(inner: Computation, parameter: Instruction, operand: Instruction) -> int:
    """Computes the bytes of an operand that a fusion reads: all of it, or only its slices.

    An operand that is only updated in place is not read.
    """
    users = inner.users[parameter.name]
    parts = 0
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == parameter.name:
            parts += sum(shape.bytes for shape in user.shapes)
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name):
            return _main_memory(operand.shapes)
    # Slices may overlap.
    return min(parts, _main_memory(operand.shapes))


def _written(inner: Computation, result: Instruction) -> int:
    """Computes the bytes that a fusion writes: its results, or only the updated part of a result."""
    if result.opcode == "tuple":
        return sum(_written(inner, operand) for operand in inner.operands(result))
    if result.opcode == "bitcast":
        source = inner.operands(result)[0]
        return _written(inner, source) if source.opcode == "dynamic-update-slice" else _main_memory(result.shapes)
    if result.opcode == "dynamic-update-slice" and _main_memory(result.shapes):
        return sum(shape.bytes for shape in inner.operands(result)[1].shapes)
    return _main_memory(result.shapes)


def _are_parts(operands: Iterable[Instruction], computation: Computation, module: Module) -> bool:
    """Returns whether every non-scalar operand is a broadcast value except for the part that the device writes."""
    arrays = [operand for operand in operands if any(shape.dims for shape in operand.shapes)]
    return bool(arrays) and all(_is_part(array, computation, module) for array in arrays)


def _is_part(array: Instruction, computation: Computation, module: Module) -> bool:
    """Returns whether an array is a broadcast value with one slice updated, possibly within a fusion."""
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
    """Returns the shapes of an all-gather's operands after gathering."""
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
