"""XLA compiler options of an engine's programs, and the number of compiling threads."""

import os
from typing import Any, Final

import jax

from stack_core.chips.context import target
from stack_core.chips.gpu_configs import GPU_CONFIGS

__all__ = ["compile_threads", "compiler_options", "is_for_gpus"]

# XLA's default records no loops. Each loop then waits for the host to read its condition: 51 times per token in a
# trace of an H100 that decoded one row, in which the GPU was idle half of the time.
_GRAPHS: Final = "xla_gpu_enable_command_buffer"
_RECORDED: Final = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
_MOST_THREADS = 16


def is_for_gpus() -> bool:
    """Returns whether programs are compiled for GPUs, by the surrounding target or else JAX's default backend."""
    return jax.default_backend() == "gpu" if target.value is None else target.value.kind in GPU_CONFIGS


def compiler_options() -> dict[str, Any] | None:
    """Returns the compiler options of a step: on GPUs it is recorded as one CUDA graph, with its loops.

    The flag in `XLA_FLAGS` takes precedence. Without it, the device of an H100 was idle for half of a
    token at one row.
    """
    if not is_for_gpus() or _GRAPHS in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_GRAPHS: _RECORDED}


def compile_threads() -> int:
    """Returns the number of threads that compile: all CPUs if the programs are for GPUs, otherwise 2.

    On CPUs, XLA itself compiles a program with several threads.
    """
    return min(os.cpu_count() or 1, _MOST_THREADS) if is_for_gpus() else 2
