"""Size limits of the kernels that do little work per number."""

from stack_core.abi.ops import OpCall
from stack_core.chips import Chip
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.numbers import WRITTEN

__all__ = ["MIN_ROWS", "MIN_SIZE", "supports_many_rows"]

MIN_SIZE = 2**15
"""Smaller arrays are left to XLA, which fuses them with the operations around."""

MIN_ROWS = 64
"""Decoding has fewer: norms of 8 to 32 rows take XLA 0.94 to 1.07 times as long, 64 of 1024 in bf16 1.34 times."""


def supports_many_rows(call: OpCall, chip: Chip, rows: int) -> bool | str:
    """Checks support for results shaped like `x`, with this many rows."""
    answer = host.on_this_cpu(call, chip)
    if answer is not True:
        return answer
    size, dtype = call.arrays["x"].size, call.arrays["x"].dtype.name
    if dtype not in WRITTEN:
        return f"it is for {', '.join(WRITTEN)}, and x is {dtype}"
    if size < MIN_SIZE:
        return f"it is for {MIN_SIZE} numbers or more, and the result has {size}"
    return rows >= MIN_ROWS or f"it is for {MIN_ROWS} rows or more, and the result has {rows}"
