"""Avoidable work of devices: float32 products, casts, layout copies, padding, small products, exposed collectives.

Each rule yields findings per line of the program. Times are sums over devices.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stack_core.report.fields import number
from stack_profile.analyses.roofline import ideal_times
from stack_profile.traces.categories import category
from stack_profile.traces.collectives import Axes, collectives_of
from stack_profile.traces.operations import PICOSECOND, Operation, Ops
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.chips import Chip
    from stack_core.programs.hlo import ArrayShape

__all__ = ["Finding", "find_in_operations"]


@dataclass(frozen=True)
class Finding:
    """Avoidable time of one cause at one place.

    Attributes:
      cause: name of the cause.
      gain_s: estimated time that the change saves, summed over devices.
      evidence: measured facts.
      change: change to try.
      line: Python line, or "".
      program: name of the program, or "".
      event: operation or host event that shows it, or "".
    """

    cause: str
    gain_s: float
    evidence: str
    change: str
    line: str = ""
    program: str = ""
    event: str = ""


@dataclass(frozen=True)
class _Part:
    operation: Operation
    self_s: float
    count: int
    gain_s: float
    detail: str = ""


_Gain = Callable[[Operation, float, int], "tuple[float, str] | None"]


def find_in_operations(trace: Trace, devices: Sequence[Ops], chip: "Chip | None") -> Iterator[Finding]:
    """Yields the findings of all rules about operations.

    Args:
      devices: devices to examine.
      chip: chip with the peaks; None leaves out the rules that compare with them.
    """
    rules: tuple[tuple[str, str, _Gain], ...] = (
        (
            "float32 products",
            "Compute these products in bfloat16: cast the operands once, outside of the step, and keep float32 only in "
            "sums, norms and the optimizer.",
            functools.partial(_float32, chip),
        ),
        (
            "casts",
            "Keep the array in one dtype: cast parameters once per update and not per step or layer, and create inputs "
            "in the dtype of the computation.",
            _cast,
        ),
        (
            "layout copies",
            "Avoid the copy: express the transposition in the product's dimensions (jnp.einsum), keep arrays in the "
            "order in which the step reads them, and donate arguments that are updated.",
            _layout_copy,
        ),
        (
            "padding",
            "Choose sizes that are multiples of the chip's tile, or pad once outside of the step.",
            functools.partial(_padding, chip, _TPU_TILE if any("TPU:" in each.device for each in devices) else None),
        ),
        (
            "small products",
            "Batch the products: stack the weights or inputs and multiply once, or vmap the loop.",
            functools.partial(_small_product, chip),
        ),
    )
    for cause, change, gain in rules:
        yield from _by_line(cause, change, gain, devices)
    yield from _exposed(trace, devices)


def _by_line(cause: str, change: str, gain: _Gain, devices: Sequence[Ops]) -> Iterator[Finding]:
    groups: dict[str, list[_Part]] = {}
    for operation, self_s, count in (total for each in devices for total in each.totals()):
        if (found := gain(operation, self_s, count)) is not None and found[0] > 0:
            groups.setdefault(_line(operation), []).append(_Part(operation, self_s, count, *found))
    for line, parts in groups.items():
        heaviest = max(parts, key=lambda part: part.gain_s)
        names = list(dict.fromkeys(part.operation.name for part in parts))
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self_s, count = sum(part.self_s for part in parts), sum(part.count for part in parts)
        details = "; ".join(dict.fromkeys(part.detail for part in parts if part.detail))
        evidence = f"{listed}: {number('_s', self_s)} in {count:,} executions{f'; {details[:200]}' if details else ''}"
        yield Finding(
            cause,
            sum(part.gain_s for part in parts),
            evidence,
            change,
            line,
            heaviest.operation.module,
            heaviest.operation.name,
        )


def _line(operation: Operation) -> str:
    source = operation.instruction.source() if operation.instruction else None
    return str(source) if source else ""


_PRODUCTS: Final = ("matrix product", "convolution")


def _float32(chip: "Chip | None", operation: Operation, self_s: float, count: int) -> tuple[float, str] | None:
    """Estimates the gain of bfloat16 as the fraction by which the binding peak time shrinks."""
    cost = operation.cost
    if chip is None or cost is None or set(cost.flops.by_dtype) != {"float32"} or not chip.hbm_bandwidth_bytes_s:
        return None
    wide, narrow = chip.peak_flops.get("float32"), chip.peak_flops.get("bfloat16")
    if not wide or not narrow or narrow <= wide or category(operation.instruction) not in _PRODUCTS:
        return None
    memory_s = cost.traffic_bytes / chip.hbm_bandwidth_bytes_s
    before = max(cost.flops.total / wide, memory_s)
    # A product that converts operands inside of its kernel reads them in their own dtype.
    after = max(cost.flops.total / narrow, memory_s * (1 - _float32_share(operation) / 2))
    peaks = f"the peak is {number('_flops_s', narrow)}FLOP/s in bfloat16, {number('_flops_s', wide)}FLOP/s in float32"
    return self_s * (1 - after / before), peaks


def _float32_share(operation: Operation) -> float:
    """Returns the fraction of an operation's operands and results that is float32, by bytes; 1 if unknown."""
    module = operation.program.module if operation.program else None
    name = operation.name.removeprefix("%")
    for computation in module.computations.values() if module else ():
        if name in computation.instructions:
            instruction = computation.instructions[name]
            arrays = [each for found in (*computation.operands(instruction), instruction) for each in found.shapes]
            total = sum(each.bytes for each in arrays)
            return sum(each.bytes for each in arrays if each.dtype == "f32") / total if total else 1.0
    return 1.0


_PASSIVE: Final = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "reshape", "broadcast", "slice"}
)
_SLICES: Final = frozenset({"dynamic-slice", "dynamic-update-slice", "transpose"})


def _cast(operation: Operation, self_s: float, count: int) -> tuple[float, str] | None:
    """All time of operations that only convert between dtypes."""
    instruction = operation.instruction
    if (
        instruction is None
        or "convert" not in instruction.opcodes
        or instruction.opcodes - _PASSIVE - _SLICES - {"convert", "fusion"}
    ):
        return None
    shapes = _shapes(operation)
    return self_s, f"writes {', '.join(shapes)}" if shapes else ""


def _layout_copy(operation: Operation, self_s: float, count: int) -> tuple[float, str] | None:
    """All time of operations that only move an array into another order of its dimensions."""
    instruction = operation.instruction
    if instruction is None or category(instruction) != "copy and layout":
        return None
    if not instruction.opcodes & {"copy", "transpose", "reverse"}:
        return None
    # A fill with a constant reads nothing.
    if "broadcast" in instruction.opcodes and "parameter" not in instruction.opcodes:
        return None
    shapes = _shapes(operation)
    return self_s, f"copies {', '.join(shapes)}" if shapes else ""


def _shapes(operation: Operation) -> list[str]:
    return [f"{each.dtype}[{','.join(map(str, each.dims))}]" for each in _results(operation)[:2]]


def _results(operation: Operation) -> Sequence["ArrayShape"]:
    """Returns the shapes that an operation writes; none if its program is unknown."""
    module = operation.program.module if operation.program else None
    name = operation.name.removeprefix("%")
    for computation in module.computations.values() if module else ():
        if name in computation.instructions:
            return computation.instructions[name].shapes
    return ()


_TPU_TILE: Final = (8, 128)  # rows and columns of a vector register of 32-bit numbers
_FULL: Final = 0.9


def _padding(
    chip: "Chip | None", tile: tuple[int, int] | None, operation: Operation, self_s: float, count: int
) -> tuple[float, str] | None:
    """Estimates the time of pads, and of products the fraction by which the binding peak time shrinks in full tiles."""
    instruction = operation.instruction
    if instruction is None:
        return None
    if "pad" in instruction.opcodes and category(instruction) == "slice and update":
        return self_s, f"pads to {', '.join(_shapes(operation))}"
    results = _results(operation)
    if tile is None or category(instruction) != "matrix product" or not results or len(results[0].dims) < 2:
        return None
    compute_s, memory_s = ideal_times(operation.cost, chip, 1)
    rows, columns = results[0].dims[-2:]
    used = math.prod(size / (math.ceil(size / part) * part) for size, part in zip((rows, columns), tile, strict=True))
    if not compute_s or memory_s is None or used >= _FULL:
        return None
    # Unused parts cost nothing while the memory is the limit, as in products with a single row.
    gain_s = self_s * (1 - max(compute_s, memory_s) / max(compute_s / used, memory_s))
    return gain_s, f"{rows} x {columns} fills {used:.0%} of its tiles"


_MANY: Final = 16
_SMALL_S: Final = 1e-5


def _small_product(chip: "Chip | None", operation: Operation, self_s: float, count: int) -> tuple[float, str] | None:
    """Estimates the time above the peaks of products shorter than `_SMALL_S` that run `_MANY` times in one run."""
    cost = operation.cost
    if cost is None or category(operation.instruction) != "matrix product":
        return None
    if not cost.times or cost.times < _MANY or self_s / count > _SMALL_S:
        return None
    compute_s, memory_s = ideal_times(cost, chip, count)
    if compute_s is None or memory_s is None:
        return None
    return self_s - max(compute_s, memory_s), f"{number('_s', self_s / count)} each, {cost.times} times in a run"


def _exposed(trace: Trace, devices: Sequence[Ops]) -> Iterator[Finding]:
    """Yields exposed collectives by line."""
    found = collectives_of(trace.devices, Axes.of(trace.about, len(trace.devices)))
    groups: dict[str, list[tuple[Operation, str, float, float]]] = {}
    for device in devices:
        for each in found[device.device]:
            exposed_s, time_s = float(each.exposed_ps.sum()) * PICOSECOND, int(each.duration_ps.sum()) * PICOSECOND
            groups.setdefault(_line(each.operation), []).append((each.operation, each.kind.name, exposed_s, time_s))
    for line, parts in groups.items():
        operation = max(parts, key=lambda part: part[2])[0]
        exposed_s, time_s = sum(part[2] for part in parts), sum(part[3] for part in parts)
        kinds = ", ".join(dict.fromkeys(part[1] for part in parts))
        yield Finding(
            "exposed collectives",
            exposed_s,
            f"{kinds}: no other operation runs during {number('_s', exposed_s)} of {number('_s', time_s)}",
            "Overlap them with computation: XLA's latency-hiding scheduler, a larger batch per device, or a mesh whose "
            "axis sends less.",
            line,
            operation.module,
            operation.name,
        )
