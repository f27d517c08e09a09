"""Avoidable work that shows in the kernels of GPUs: slow products, unfused element-wise work, and stacked residuals.

It also has loops whose conditions the host reads. Times are sums over devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stack_core.report.fields import number
from stack_profile.analyses.advice_operations import Finding
from stack_profile.analyses.roofline import ideal_times
from stack_profile.traces.categories import HOST_COPY, category_of
from stack_profile.traces.hlo import Program
from stack_profile.traces.instructions import CONTAINERS
from stack_profile.traces.intervals import union
from stack_profile.traces.operations import PICOSECOND, Operation, Ops
from stack_profile.traces.trace import Trace

if TYPE_CHECKING:
    from stack_core.chips import Chip

__all__ = ["find_in_kernels"]


def find_in_kernels(trace: Trace, devices: Sequence[Ops], chip: "Chip | None") -> Iterator[Finding]:
    """Yields the findings of all rules about kernels.

    Args:
      trace: the trace, for the number of steps.
      devices: devices to examine.
      chip: chip with the peaks; None leaves out the rules that need peaks.
    """
    steps = sum(len(trace.steps[each.device]) for each in devices)
    totals = [_Total(*total) for each in devices for total in each.totals() if total[1] > 0]
    yield from _stacked_residuals(totals)
    kernels = [each for each in totals if each.operation.kernel]
    yield from _host_conditions(devices)
    if chip is not None and chip.hbm_bandwidth_bytes_s:
        yield from _unfused(kernels, chip.hbm_bandwidth_bytes_s, steps)
        yield from _slow_products(kernels, chip)


@dataclass(frozen=True)
class _Total:
    operation: Operation
    self_s: float
    count: int

    @property
    def line(self) -> str:
        source = self.operation.instruction.source() if self.operation.instruction else None
        return str(source) if source else ""


def _by_line(totals: Sequence[_Total]) -> Mapping[str, list[_Total]]:
    """Groups by line, with the largest total first in each group."""
    found: dict[str, list[_Total]] = {}
    for each in sorted(totals, key=lambda total: -total.self_s):
        found.setdefault(each.line, []).append(each)
    return found


def _finding(cause: str, gain_s: float, evidence: str, change: str, heaviest: _Total) -> Finding:
    operation = heaviest.operation
    return Finding(cause, gain_s, evidence, change, heaviest.line, operation.module, operation.name)


_MOVES: Final = frozenset(
    {"dynamic-slice", "dynamic-update-slice", "slice", "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
     "reshape", "broadcast", "select", "add", "subtract", "compare", "convert", "copy", "fusion"}
)  # fmt: skip
_FILLS: Final = frozenset({"broadcast", "constant", "copy", "tuple"})


def _stacked_residuals(totals: Sequence[_Total]) -> Iterator[Finding]:
    """Yields the time to store values of a differentiated loop in stacked arrays and to load them again."""
    for found in _by_line([each for each in totals if _is_stacking(each.operation)]).values():
        fills = [each for each in found if "dynamic" not in each.operation.instruction_primitive]
        if len(fills) == len(found):
            continue
        self_s, filled_s = sum(each.self_s for each in found), sum(each.self_s for each in fills)
        evidence = (
            f"{sum(each.count for each in found):,} executions copy the loop's values into stacked arrays and out of "
            f"them: {number('_s', self_s)}, {number('_s', filled_s)} of it fills new arrays"
        )
        change = (
            "Unroll the loop over layers (unroll of jax.lax.scan, `model.unroll: true` in stack-train), whose values "
            "then stay where they are computed, or store fewer values with jax.checkpoint."
        )
        yield _finding("stacked residuals", self_s, evidence, change, found[0])


def _is_stacking(operation: Operation) -> bool:
    instruction = operation.instruction
    if instruction is None or "jvp(" not in instruction.op_name or operation.is_container:
        return False
    if operation.instruction_primitive in ("dynamic_slice", "dynamic_update_slice"):
        return "/while/body/" in instruction.op_name and instruction.opcodes <= _MOVES
    # Before the loop, XLA fills the arrays.
    return operation.instruction_primitive == "while" and instruction.opcodes <= _FILLS


def _host_conditions(devices: Sequence[Ops]) -> Iterator[Finding]:
    """Yields loops and branches whose condition is copied to the host, with the time until the device works again."""
    found: dict[str, list[tuple[_Total, float]]] = {}
    for ops in devices:
        rows = [
            row
            for row, each in enumerate(ops.operations)
            if each.instruction is not None and each.instruction.opcode in CONTAINERS and category_of(each) == HOST_COPY
        ]
        waits = _waits(ops)
        for row in rows:
            chosen = np.flatnonzero(ops.which == row)
            total = _Total(ops.operations[row], float(ops.self_ps[chosen].sum()) * PICOSECOND, len(chosen))
            found.setdefault(total.line, []).append((total, float(waits[chosen].sum()) * PICOSECOND))
    for parts in found.values():
        count = sum(total.count for total, _ in parts)
        copies_s, wait_s = sum(total.self_s for total, _ in parts), sum(wait for _, wait in parts)
        yield _finding(
            "loop conditions on the host",
            copies_s + wait_s,
            f"{count:,} copies of conditions ({len(parts)} loops or branches) to the host, after which the device "
            f"waited {number('_s', wait_s)} for the next launch, {number('_s', wait_s / count)} each",
            "Give the loop a trip count that is known when it is compiled (jax.lax.fori_loop with constant bounds and "
            "a mask), or use a kernel that loops on the device, such as one for paged attention.",
            max((total for total, _ in parts), key=lambda total: total.count),
        )


def _waits(ops: Ops) -> np.ndarray:
    """Returns the time from the end of each execution until any operation runs, 0 if one already runs."""
    busy = union(ops.start_ps, ops.end_ps)
    block = np.searchsorted(busy[:, 0], ops.end_ps, "right") - 1
    following = np.append(busy[1:, 0], busy[-1:, 1])
    return np.where(busy[block, 1] == ops.end_ps, following[block] - ops.end_ps, 0)


_FUSIBLE: Final = ("elementwise", "reduction")
_THROUGH: Final = ("bitcast", "get-tuple-element", "reshape")


def _unfused(kernels: Sequence[_Total], bandwidth_bytes_s: float, steps: int) -> Iterator[Finding]:
    """Yields the time of element-wise kernels and reductions, and the traffic between such kernels.

    An array that only such kernels read would neither be written nor read again if one kernel computed it and its
    users. The gain is the time of this traffic at the chip's bandwidth: an upper bound, since a user may need all of
    an array before it starts.
    """
    chosen = [each for each in kernels if category_of(each.operation) in _FUSIBLE]
    if not chosen:
        return
    names: dict[int, set[str]] = {}
    for each in chosen:
        names.setdefault(id(each.operation.program), set()).add(each.operation.name)
    programs = {id(each.operation.program): each.operation.program for each in chosen}
    saved = {key: _passed_bytes(program, names[key]) for key, program in programs.items() if program is not None}
    passed = sum(
        saved.get(id(each.operation.program), {}).get(each.operation.name, 0) * each.count
        for each in chosen
        if not each.operation.extra
    )
    self_s, count = sum(each.self_s for each in chosen), sum(each.count for each in chosen)
    lines = [(line, sum(each.self_s for each in found)) for line, found in _by_line(chosen).items() if line]
    lines.sort(key=lambda each: -each[1])
    places = ", ".join(f"{line} {number('_s', line_s)}" for line, line_s in lines[:3])
    each_step = f", {count / steps:,.0f} kernels per step" if steps else ""
    yield _finding(
        "element-wise kernels",
        min(passed / bandwidth_bytes_s, self_s),
        f"{number('_s', self_s)} in {count:,} element-wise kernels and reductions{each_step}, mostly of {places}; "
        f"{number('_bytes', passed)} pass between them through memory",
        "Compute them in fewer kernels: fused kernels for norms with residuals, gated units, rotary embeddings and the "
        "loss, one pass for the optimizer, and bfloat16 where float32 is not needed.",
        max((each for each in chosen if each.line == lines[0][0]) if lines else chosen, key=lambda each: each.self_s),
    )


def _passed_bytes(program: Program, names: set[str]) -> dict[str, int]:
    """Returns the traffic of each instruction's result that only exists because its users are separate kernels."""
    found: dict[str, int] = {}
    for computation in program.module.computations.values() if program.module else ():
        if names.isdisjoint(computation.instructions):
            continue
        users: dict[str, list[str]] = {}
        for instruction in computation.instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
        for name in names & computation.instructions.keys():
            readers = _readers(name, users, computation.instructions)
            fusible = len(names.intersection(readers))
            size = sum(shape.bytes for shape in computation.instructions[name].shapes)
            # The write is saved only if no other kernel reads the array.
            found[name] = size * (fusible + (0 < fusible == len(readers)))
    return found


def _readers(name: str, users: Mapping[str, Sequence[str]], instructions: Mapping[str, object]) -> set[str]:
    found: set[str] = set()
    pending = list(users.get(name, ()))
    while pending:
        user = pending.pop()
        if getattr(instructions[user], "opcode", "") in _THROUGH:
            pending += users.get(user, ())
        else:
            found.add(user)
    return found


_REACHABLE: Final = 0.8  # fraction of a chip's peaks that good kernels of products reach
_LONG_S: Final = 5e-6  # shorter kernels are limited by their launch and the latency of memory


def _slow_products(kernels: Sequence[_Total], chip: "Chip") -> Iterator[Finding]:
    """Yields products well below the binding peak, by line."""
    products = [each for each in kernels if category_of(each.operation) in ("matrix product", "convolution")]
    for found in _by_line([each for each in products if each.self_s / each.count > _LONG_S]).values():
        times = [ideal_times(each.operation.cost, chip, each.count) for each in found]
        slow = [
            (each, max(compute_s, memory_s), memory_s > compute_s)
            for each, (compute_s, memory_s) in zip(found, times, strict=True)
            if compute_s is not None and memory_s is not None and max(compute_s, memory_s) < _REACHABLE * each.self_s
        ]
        if not slow:
            continue
        self_s, ideal_s = sum(each.self_s for each, _, _ in slow), sum(ideal for _, ideal, _ in slow)
        names = ", ".join(list(dict.fromkeys(each.operation.kernel for each, _, _ in slow))[:3])
        peak = "bandwidth" if sum(ideal for _, ideal, memory in slow if memory) > ideal_s / 2 else "FLOP/s"
        yield _finding(
            "slow products",
            self_s - ideal_s / _REACHABLE,
            f"{names}: {number('_s', self_s)} in {sum(each.count for each, _, _ in slow):,} executions at "
            f"{ideal_s / self_s:.0%} of the chip's {peak}, of which good kernels reach {_REACHABLE:.0%}",
            "Try other kernels for these sizes: cuBLAS instead of Triton or the reverse "
            "(--xla_gpu_enable_triton_gemm), a higher --xla_gpu_autotune_level, another implementation of the op, or "
            "fewer and larger products.",
            slow[0][0],
        )
