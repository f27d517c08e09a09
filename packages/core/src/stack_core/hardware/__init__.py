"""What the hardware can do, and what a program asks of it."""

from stack_core.contracts.chips import Chip
from stack_core.hardware.chips import chip_of, count_units, current_chip
from stack_core.hardware.flops import Flops, count_flops, model_flops_per_step
from stack_core.hardware.target_chip import target_chip, use_chip
from stack_core.hardware.targets import Target, use_target

__all__ = [
    "Chip",
    "Flops",
    "Target",
    "chip_of",
    "count_flops",
    "count_units",
    "current_chip",
    "model_flops_per_step",
    "target_chip",
    "use_chip",
    "use_target",
]
