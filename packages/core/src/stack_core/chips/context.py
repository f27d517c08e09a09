"""The chip that programs are traced for, which need not be the local one."""

import contextlib
from typing import Final

from stack_core.abi.chips import Chip
from stack_core.abi.jit_context import JitContext
from stack_core.chips.devices import current_chip

__all__ = ["target", "target_chip", "use_chip"]

target: Final[JitContext[Chip]] = JitContext()
"""The chip of the surrounding `use_chip`, or None."""


def target_chip() -> Chip:
    """Returns the chip of the surrounding `use_chip`, otherwise the chip of JAX's first device.

    Raises:
      HardwareError: as in `current_chip`.
    """
    return target.value or _current_chip()


def use_chip(chip: Chip) -> contextlib.AbstractContextManager[None]:
    """Makes `chip` the target of everything traced in this context. Contexts nest.

    Ops choose their implementations for the target. A function that `jax.jit` traced for another chip, or outside of
    any `use_chip`, is traced again.
    """
    return target(chip)


def _current_chip() -> Chip:
    import jax

    with jax.ensure_compile_time_eval():  # A measurement must run now, not become part of the trace.
        return current_chip()
