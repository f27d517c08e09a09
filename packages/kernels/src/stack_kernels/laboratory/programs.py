"""The kernels of a compiled program: their names and resource usage."""

import re
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Usage", "kernels_of", "usage_of"]

# Call targets of kernels, without XLA's own library calls such as __cublas$gemm.
_TARGETS = re.compile(r"tpu_custom_call|mosaic_gpu\w*|\w*\$?[\w.]*triton[\w.]*|__cudnn[\w$]*")
_CALL = re.compile(r'%?([\w.\-]+) = [^\n]*? custom-call\([^\n]*?custom_call_target="([^"]+)"')
_VECTOR_MEMORY = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """Resource usage of a program's kernels, the maximum over the kernels.

    None if unknown or not applicable to the chip.

    Attributes:
      kernels: number of calls by name of the kernel.
      vector_memory_bytes: VMEM of a TPU core.
      registers: registers per GPU thread.
      spilled_bytes: bytes that a thread stores in memory for lack of registers.
      shared_bytes: shared memory of a block, as laid out by the compiler.
    """

    kernels: dict[str, int] = field(default_factory=dict)
    vector_memory_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None


def kernels_of(text: str) -> dict[str, int]:
    """Counts the kernel calls of a compiled program by name; "target:name" unless the name is informative."""
    found: Counter[str] = Counter()
    for name, target in _CALL.findall(text):
        if _TARGETS.fullmatch(target):
            plain = re.sub(r"(\.\d+)+$", "", name)
            found[plain if target == "tpu_custom_call" else f"{target}:{plain}"] += 1
    return dict(found)


def usage_of(text: str, output: str) -> Usage:
    """Reads a compiled program, and the compilers' output under MOSAIC_GPU_DUMP_PTXAS=1."""

    def largest(pattern: re.Pattern[str], where: str) -> int | None:
        return max((int(number) for number in pattern.findall(where)), default=None)

    return Usage(
        kernels=kernels_of(text),
        vector_memory_bytes=largest(_VECTOR_MEMORY, text),
        registers=largest(_REGISTERS, output),
        spilled_bytes=largest(_SPILLS, output),
        shared_bytes=largest(_SHARED, output),
    )
