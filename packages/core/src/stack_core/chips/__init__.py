"""Hardware specifications: known chips, the chip to compile for, and targets that need not be attached."""

from stack_core.abi.chips import Chip
from stack_core.chips.context import target_chip, target_platform, use_chip
from stack_core.chips.devices import chip_of, count_units, current_chip
from stack_core.chips.targets import Target, use_target

__all__ = [
    "Chip",
    "Target",
    "chip_of",
    "count_units",
    "current_chip",
    "target_chip",
    "target_platform",
    "use_chip",
    "use_target",
]
