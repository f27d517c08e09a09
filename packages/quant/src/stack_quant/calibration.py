"""Names and arguments of calibrations, as written in a recipe: "rms,7"."""

import math
from dataclasses import dataclass
from typing import Final

from stack_core.abi.errors import ArgumentError, UnknownName, nearest

__all__ = ["CALIBRATIONS", "STREAM_BATCHES", "Calibration", "calibration", "check_batches"]


@dataclass(frozen=True)
class Calibration:
    """A method of finding the range of an array, with its arguments.

    Attributes:
      name: a key of `CALIBRATIONS`.
      arguments: numbers after the name, or their defaults.
    """

    name: str
    arguments: tuple[float, ...] = ()

    @property
    def asymmetric(self) -> bool:
        """True if the range may be off-centre, which requires a zero point."""
        if self.name == "fixed":
            low, high = self.fixed
            return low != -high
        return self.name == "minmax"

    @property
    def fixed(self) -> tuple[float, float]:
        """The range (low, high) of "fixed"."""
        *low, high = self.arguments
        return (low[0] if low else -high), high


CALIBRATIONS: Final = {
    "absmax": "absmax[,factor]: the largest magnitude, times factor",
    "minmax": "minmax[,factor]: the minimum and the maximum, times factor, with a zero point",
    "rms": "rms,factor: factor times the root mean square",
    "percentile": "percentile,p: the p-th percentile of the magnitudes",
    "mse": "mse: the absmax range, shrunk to the factor with the smallest squared rounding error",
    "fixed": "fixed,high or fixed,low,high: the given range, centred on zero or not",
    "moving": "moving,decay: the exponential moving average of the largest magnitudes of a stream of batches",
}
"""Syntax and meaning of each calibration."""

STREAM_BATCHES: Final = 16
"""Default number of batches over which static ranges are measured."""

_LEAST_BATCHES: Final = {"calibration_batches": 1, "evaluation_batches": 0}

_DEFAULTS = {"absmax": (1.0,), "minmax": (1.0,), "percentile": (99.9,), "moving": (0.99,)}


def calibration(text: str) -> Calibration:
    """Parses "name" or "name,argument,...".

    Raises:
      UnknownName: the calibration does not exist; the message suggests the nearest name and lists all names.
      ArgumentError: the arguments are invalid; the message describes the syntax.
    """
    name, *rest = (part.strip() for part in text.split(","))
    if name not in CALIBRATIONS:
        forms = "; ".join(CALIBRATIONS.values())
        raise UnknownName(f"Unknown calibration {name!r}.{nearest(name, CALIBRATIONS)} Calibrations: {forms}.")
    try:
        arguments = tuple(float(part) for part in rest) or _DEFAULTS.get(name, ())
    except ValueError:
        raise ArgumentError(f"Calibration {text!r}: expected numbers. {CALIBRATIONS[name]}.") from None
    if not (all(map(math.isfinite, arguments)) and _fits(name, arguments)):
        raise ArgumentError(f"Calibration {text!r} has arguments out of range. {CALIBRATIONS[name]}.")
    return Calibration(name, arguments)


def check_batches(**counts: int) -> None:
    """Raises an ArgumentError for a number of batches below 1 for calibration, or below 0 for evaluation."""
    for name, count in counts.items():
        least = _LEAST_BATCHES[name]
        if not isinstance(count, int) or count < least:
            raise ArgumentError(f"{name} is {count!r}; expected a whole number of at least {least}.")


def _fits(name: str, arguments: tuple[float, ...]) -> bool:
    if name == "fixed":
        return len(arguments) in (1, 2) and _contains_zero(*Calibration(name, arguments).fixed)
    if name == "mse":
        return not arguments
    if name == "moving":
        return len(arguments) == 1 and 0 <= arguments[0] < 1
    return len(arguments) == 1 and 0 < arguments[0] <= (100 if name == "percentile" else math.inf)


def _contains_zero(low: float, high: float) -> bool:
    return low <= 0 <= high and low < high
