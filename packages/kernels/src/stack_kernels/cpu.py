"""What the CPU implementations of all ops share."""

from stack_core.abi import OpCall
from stack_core.hardware import Chip
from stack_core.ops.building import is_quantized

__all__ = ["on_cpu", "on_cpu_unquantized"]


def on_cpu(call: OpCall, chip: Chip) -> bool | str:
    """The `supports` of what takes every call where the target is a CPU, whatever the machine at hand is."""
    return True if chip.kind == "cpu" else f"it is for CPUs, and the target is {chip.kind}"


def on_cpu_unquantized(call: OpCall, chip: Chip) -> bool | str:
    """`on_cpu`, for implementations that take no quantized operand."""
    quantized = [name for name, array in call.arrays.items() if is_quantized(array)]
    return f"{' and '.join(quantized)} is quantized" if quantized else on_cpu(call, chip)
