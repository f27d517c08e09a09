"""What the CPU implementations of all ops share."""

from stack_core.hardware import Chip

__all__ = ["on_cpu"]


def on_cpu(chip: Chip) -> bool | str:
    """True where the target is a CPU, whatever the machine at hand is; else why not."""
    return True if chip.kind == "cpu" else f"it is for CPUs, and the target is {chip.kind}"
