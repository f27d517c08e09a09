"""The chip that a program is traced for, which need not be the one at hand."""

import contextlib
from typing import Final

from stack_core.abi.chips import Chip
from stack_core.abi.jit_context import JitContext
from stack_core.chips.devices import current_chip

__all__ = ["target", "target_chip", "use_chip"]

target: Final[JitContext[Chip]] = JitContext()
"""The chip of the surrounding `use_chip`, or None."""


def target_chip() -> Chip:
    """The chip of the surrounding `use_chip`; outside of one, that of JAX's first device.

    Raises:
      HardwareError: as `current_chip` does.
    """
    return target.value or _current_chip()


def use_chip(chip: Chip) -> contextlib.AbstractContextManager[None]:
    """Makes `chip` the target of what is traced in this context; it nests.

    Ops choose their implementations for the target. A function that `jax.jit` traced for another chip, or outside of
    any `use_chip`, is traced again.
    """
    return target(chip)


def _current_chip() -> Chip:
    import jax

    with jax.ensure_compile_time_eval():  # A measurement must run, not become part of the program that is traced.
        return current_chip()
