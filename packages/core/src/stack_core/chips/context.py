"""The chip that programs are traced for, which need not be the local one."""

import contextlib
import re
from typing import Final

from stack_core.abi.chips import Chip
from stack_core.chips.devices import current_chip
from stack_core.chips.jit_context import JitContext

__all__ = ["target", "target_chip", "target_platform", "use_chip"]

# By kind of chip, first match: TPU generations are named v6e, v5p, ...; every other kind is a GPU.
_PLATFORMS = {"cpu": r"cpu", "tpu": r"tpu|v\d", "gpu": r".*"}

target: Final[JitContext[Chip]] = JitContext()
"""The chip of the surrounding `use_chip`, or None."""


def target_chip() -> Chip:
    """Returns the chip of the surrounding `use_chip`, otherwise the chip of JAX's first device.

    Raises:
      HardwareError: as in `current_chip`.
    """
    return target.value or _current_chip()


def target_platform() -> str:
    """Returns the platform of the target, without measuring the chip."""
    if target.value is None:
        import jax

        return {"cuda": "gpu", "rocm": "gpu"}.get(jax.default_backend(), jax.default_backend())
    return next(name for name, pattern in _PLATFORMS.items() if re.match(pattern, target.value.kind.lower()))


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
