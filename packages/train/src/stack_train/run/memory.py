"""Memory checks of a run: its state and gradients before anything is traced, then the compiled step."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from stack_core.abi.errors import HardwareError
from stack_core.chips.memory import free_bytes
from stack_core.programs.roofline import program_memory
from stack_train.step.precision import wide_dtype
from stack_train.step.program import Program, compile_lowered

__all__ = ["ADVICE", "check_state", "compile_fitting", "out_of_memory"]

ADVICE = (
    "Split it over more devices with mesh.fsdp or mesh.tensor, lower data.batch_size, raise run.accumulation_steps, or "
    "set model.remat to full."
)
_STATE_ADVICE = (
    "Split it over more devices with mesh.fsdp or mesh.tensor, train a smaller model, choose an optimizer that keeps "
    "less, such as adafactor, or set optimizer.moments to 8bit, optimizer.offload to true or precision.params to "
    "bfloat16. `stack compile RUN.yaml --target v5p:2x2x1` shows what fits elsewhere."
)
_GIB = 2**30


def check_state(program: Program) -> None:
    """Raises a HardwareError if a step's state and gradients exceed the free memory of a device."""
    state = program.abstract_state
    # A single gradient has its parameter's dtype; only sums over microbatches or stages are wider.
    is_summed = program.step.accumulation_steps > 1 or program.step.schedule is not None
    parts = {
        "parameters": _device_bytes((state.params, state.mutable, state.frozen)),
        "gradients": _device_bytes(state.trained, wide=is_summed),
        "optimizer state": _device_bytes(state.opt_state),
        "auxiliary models": _device_bytes(state.auxiliary),
    }
    _check("A step's state and gradients take", sum(parts.values()), parts, program, _STATE_ADVICE)


def compile_fitting(step: jax.stages.Traced, program: Program) -> jax.stages.Compiled:
    """Compiles a run's step.

    Raises:
      HardwareError: the step needs more memory than a device has free.
    """
    with out_of_memory():
        compiled = compile_lowered(step.lower())
    memory = program_memory(compiled, program.mesh.devices.flat[0].platform)
    parts = {
        "state and batch": memory.argument_bytes,
        "temporaries": memory.temporary_bytes,
        "outputs that reuse no input": memory.output_bytes - memory.aliased_bytes,
    }
    _check("The compiled step takes", memory.total_bytes, parts, program, ADVICE)
    return compiled


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Converts out-of-memory errors of the compiler or the allocator to a HardwareError with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise HardwareError(f"The run does not fit the memory of a device. {ADVICE}\n{error}") from error


def _check(subject: str, needed_bytes: int, parts: Mapping[str, int], program: Program, advice: str) -> None:
    # Other processes' devices do not report their memory here.
    devices = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    left_bytes = free_bytes(devices)
    if left_bytes is None or needed_bytes <= left_bytes:
        return
    listing = ", ".join(f"{name} {size / _GIB:,.2f}" for name, size in parts.items() if size)
    raise HardwareError(
        f"{subject} {needed_bytes / _GIB:,.2f} GiB of a device's memory ({listing}); "
        f"{devices[0].device_kind} has {left_bytes / _GIB:,.2f} GiB left. {advice}"
    )


def _device_bytes(tree: Any, *, wide: bool = False) -> int:
    """Computes the size in bytes of the shards of arrays in the memory of one device.

    Args:
      wide: count in `wide_dtype`, the dtype of accumulated gradients.
    """

    def size(leaf: Any) -> int:
        if leaf.sharding.memory_kind == "pinned_host":
            return 0
        dtype = wide_dtype(leaf.dtype) if wide else leaf.dtype
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
