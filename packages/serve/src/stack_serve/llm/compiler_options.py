"""XLA compiler options of an engine's programs, and the number of compiling threads."""

import os
from typing import Any, Final

from stack_core.chips.context import target_platform

__all__ = ["compile_threads", "compiler_options", "is_for_gpus"]

# XLA's default records no loops. Each loop then waits for the host to read its condition: 51 times per token in a
# trace of an H100 that decoded one row, in which the GPU was idle half of the time.
_GRAPHS: Final = "xla_gpu_enable_command_buffer"
_RECORDED: Final = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# By default, XLA schedules programs of CPUs for concurrency: a prompt of 128 tokens dequantizes the weights of all
# layers before the first one. For SmolLM2-135M in Q4_1 each call allocated 406 MB, and with this scheduler allocates
# 4 MB; the first token comes after 198 instead of 675 ms. Decoding has small temporaries and keeps the default.
_SCHEDULER: Final = "xla_cpu_scheduler_type"
_LEAST_MEMORY: Final = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
_DECODING = ("decode", "forward", "sample")
_MOST_THREADS = 16


def is_for_gpus() -> bool:
    """Returns whether programs are compiled for GPUs, by the surrounding target or else JAX's default backend."""
    return target_platform() == "gpu"


def compiler_options(kind: str) -> dict[str, Any] | None:
    """Returns the compiler options of a kind of program.

    On GPUs a step is recorded as one CUDA graph, with its loops. Without the graph, an H100 that decoded one row was
    idle half of the time. On CPUs, programs of many tokens reuse the memory of their temporaries. Flags in `XLA_FLAGS`
    take precedence.
    """
    platform, flags = target_platform(), os.environ.get("XLA_FLAGS", "")
    if platform == "gpu" and _GRAPHS not in flags:
        return {_GRAPHS: _RECORDED}
    if platform == "cpu" and kind not in _DECODING and _SCHEDULER not in flags:
        return {_SCHEDULER: _LEAST_MEMORY}
    return None


def compile_threads() -> int:
    """Returns the number of threads that compile: all CPUs if the programs are for GPUs, otherwise 2.

    On CPUs, XLA itself compiles a program with several threads.
    """
    return min(os.cpu_count() or 1, _MOST_THREADS) if is_for_gpus() else 2
