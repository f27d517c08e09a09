"""What a compiled program says of its kernels: their names, and what they take of a chip."""

import re
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Usage", "kernels_of", "usage_of"]

# What calls a kernel; XLA's own calls of libraries, such as __cublas$gemm, are none.
_TARGETS = re.compile(r"tpu_custom_call|mosaic_gpu\w*|\w*\$?[\w.]*triton[\w.]*|__cudnn[\w$]*")
_CALL = re.compile(r'%?([\w.\-]+) = [^\n]*? custom-call\([^\n]*?custom_call_target="([^"]+)"')
_VECTOR_MEMORY = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """What the kernels of a program take, each the largest of them; None is "not known" or "not on this chip".

    Attributes:
      kernels: the name of each, and how often the program calls it.
      vector_memory_bytes: VMEM, of a TPU's core.
      registers: of a GPU's thread.
      spilled_bytes: what a thread stores in memory for lack of registers.
      shared_bytes: shared memory of a block that the compiler laid out.
    """

    kernels: dict[str, int] = field(default_factory=dict)
    vector_memory_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None


def kernels_of(text: str) -> dict[str, int]:
    """The kernels that a compiled program calls, by name, and how often; "target:name" where a name says little."""
    found: Counter[str] = Counter()
    for name, target in _CALL.findall(text):
        if _TARGETS.fullmatch(target):
            plain = re.sub(r"(\.\d+)+$", "", name)
            found[plain if target == "tpu_custom_call" else f"{target}:{plain}"] += 1
    return dict(found)


def usage_of(text: str, output: str) -> Usage:
    """Reads a compiled program, and what the compilers printed with MOSAIC_GPU_DUMP_PTXAS=1."""

    def largest(pattern: re.Pattern[str], where: str) -> int | None:
        return max((int(number) for number in pattern.findall(where)), default=None)

    return Usage(
        kernels=kernels_of(text),
        vector_memory_bytes=largest(_VECTOR_MEMORY, text),
        registers=largest(_REGISTERS, output),
        spilled_bytes=largest(_SPILLS, output),
        shared_bytes=largest(_SHARED, output),
    )
