"""Units of measurement after a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

__all__ = ["DEGREE", "Unit", "read_unit"]

_UNITS: Final[Mapping[str, tuple[str, Fraction]]] = {
    name: (dimension, Fraction(scale))
    for dimension, units in {
        "length": {
            "m meter metre": "1", "km kilometer kilometre": "1000", "cm centimeter centimetre": "1/100",
            "mm millimeter millimetre": "1/1000", "in inch inches": "254/10000", "ft foot feet": "3048/10000",
            "yd yard": "9144/10000", "mi mile": "1609344/1000",
        },
        "mass": {
            "kg kilogram": "1", "g gram": "1/1000", "mg milligram": "1/1000000", "t ton tonne": "1000",
            "lb pound": "45359237/100000000", "oz ounce": "45359237/1600000000",
        },
        "time": {
            "s sec second": "1", "ms millisecond": "1/1000", "min minute": "60", "h hr hour": "3600", "day": "86400",
            "week": "604800",
        },
        "volume": {"l liter litre": "1", "ml milliliter millilitre": "1/1000"},
        "angle": {"° degree": "1"},
        "money": {"$ dollar usd": "1", "¢ cent": "1/100"},
        "euro": {"€ euro eur": "1"},
        "unit": {"unit": "1"},
    }.items()
    for names, scale in units.items()
    for name in names.split()
}  # fmt: skip
_POWERS: Final = {"square": 2, "sq": 2, "cubic": 3}


@dataclass(frozen=True)
class Unit:
    """A product of powers of base units.

    Attributes:
      dimensions: exponents by dimension, such as {("length", 1), ("time", -1)}.
      scale: value of the unit in base units.
    """

    dimensions: frozenset[tuple[str, int]]
    scale: Fraction


DEGREE: Final = Unit(frozenset({("angle", 1)}), Fraction(1))


def read_unit(words: Sequence[str]) -> Unit | None:
    """Parses words such as ["km", "/", "h"] or ["square", "meters"] as a unit; None for other words."""
    exponents, scale = dict[str, int](), Fraction(1)
    sign, power, rest = 1, 0, list(words)
    while rest:
        word = rest.pop(0)
        if word in ("/", "per"):
            if sign < 0 or not exponents or not rest:
                return None
            sign = -1
            continue
        if word in _POWERS and not power and rest:
            power = _POWERS[word]
            continue
        if (found := _unit(word)) is None:
            return None
        dimension, size = found
        if rest[:1] == ["^"]:
            if power or len(rest) < 2 or rest[1] not in ("2", "3"):
                return None
            power, rest = int(rest[1]), rest[2:]
        exponent, power = sign * (power or 1), 0
        exponents[dimension] = exponents.get(dimension, 0) + exponent
        scale *= size**exponent
    return Unit(frozenset(exponents.items()), scale) if exponents and not power else None


def _unit(word: str) -> tuple[str, Fraction] | None:
    """Returns the dimension and scale of one unit; long names may be plural or capitalized."""
    if len(word) < 3:  # case matters in symbols
        return _UNITS.get(word)
    name = word.lower()
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
