"""Mathematical answers as values that can be compared: numbers, sets, intervals and tuples, without a computer algebra.

Nothing here evaluates text: what is not understood is compared letter by letter.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

__all__ = ["Answer", "Interval", "Members", "Number", "extracted", "parsed", "same_answer"]

_UNITS: Final = {
    "length": {"m": 1, "km": 1000, "cm": Fraction(1, 100), "mm": Fraction(1, 1000), "in": Fraction(254, 10_000)},
    "mass": {"kg": 1, "g": Fraction(1, 1000), "mg": Fraction(1, 10**6), "t": 1000},
    "time": {"s": 1, "sec": 1, "min": 60, "h": 3600, "hr": 3600, "day": 86_400, "ms": Fraction(1, 1000)},
    "volume": {"l": 1, "ml": Fraction(1, 1000)},
    "angle": {"°": 1, "degree": 1},
    "money": {"$": 1, "dollar": 1, "usd": 1},
    "euro": {"€": 1, "euro": 1, "eur": 1},
}
_WORDS: Final = {
    "meter": "m", "metre": "m", "kilometer": "km", "centimeter": "cm", "millimeter": "mm", "inch": "in",
    "gram": "g", "kilogram": "kg", "second": "s", "minute": "min", "hour": "h", "liter": "l", "litre": "l",
}  # fmt: skip
_MOST_BRACKETS: Final = 64
_NUMBER: Final = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class Number:
    """An exact number and its unit.

    Attributes:
      quantity: what the unit measures, such as "length"; None has no unit.
      scale: the unit in base units.
    """

    value: Fraction
    quantity: str | None = None
    scale: Fraction = Fraction(1)


@dataclass(frozen=True)
class Interval:
    """An interval; an end may be a number, or text such as "inf"."""

    low: "Answer"
    high: "Answer"
    holds_low: bool
    holds_high: bool


@dataclass(frozen=True)
class Members:
    """A set, whose order and repetitions say nothing, or a tuple."""

    members: tuple["Answer", ...]
    is_set: bool


Answer = Number | Interval | Members | str
"""A value; text that was not understood is itself."""


def extracted(text: str) -> str | None:
    r"""The answer that a text ends with: the last \boxed{}, else what follows "####" or "answer is", else a whole line.

    None where there is none of them: text of several lines or many words names no answer.
    """
    if "\\boxed{" in text or "\\fbox{" in text:
        return _last_boxed(text)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    found = re.findall(r"(?i)\banswer\s*(?:is|:|=)\s*\**\s*([^\n]+)", text)
    if found:
        return found[-1].strip().rstrip(".*").strip()
    line = text.strip()
    return line if line and "\n" not in line and len(line.split()) <= 4 else None


def _last_boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None  # it was cut off


def same_answer(ours: str, theirs: str, *, tolerance: float = 0.0) -> bool:
    """Whether two answers are the same value.

    Args:
      tolerance: how far numbers may be apart, as a share of the second.
    """
    return _same(parsed(ours), parsed(theirs), Fraction(tolerance))


def _same(ours: Answer, theirs: Answer, tolerance: Fraction) -> bool:
    if isinstance(ours, Number) and isinstance(theirs, Number):
        return _same_numbers(ours, theirs, tolerance)
    if isinstance(ours, Interval) and isinstance(theirs, Interval):
        ends = ours.holds_low == theirs.holds_low and ours.holds_high == theirs.holds_high
        return ends and _same(ours.low, theirs.low, tolerance) and _same(ours.high, theirs.high, tolerance)
    if isinstance(ours, Interval) and isinstance(theirs, Members):
        return _same(theirs, ours, tolerance)
    if isinstance(ours, Members) and isinstance(theirs, Interval):  # (1, 2) is a point or an open interval
        ends = (theirs.low, theirs.high)
        return not ours.is_set and _same(ours, Members(ends, is_set=False), tolerance) and _is_open(theirs)
    if isinstance(ours, Members) and isinstance(theirs, Members):
        return ours.is_set == theirs.is_set and _same_members(ours, theirs, tolerance)
    return isinstance(ours, str) and isinstance(theirs, str) and ours == theirs


def _same_numbers(ours: Number, theirs: Number, tolerance: Fraction) -> bool:
    has_both = ours.quantity is not None and theirs.quantity is not None
    if has_both and ours.quantity != theirs.quantity:
        return False
    scale = ours.scale / theirs.scale if has_both else 1  # without a unit, it is meant in the other's
    return abs(ours.value * scale - theirs.value) <= tolerance * abs(theirs.value)


def _is_open(interval: Interval) -> bool:
    return not (interval.holds_low or interval.holds_high)


def _same_members(ours: Members, theirs: Members, tolerance: Fraction) -> bool:
    if not ours.is_set:
        pairs = zip(ours.members, theirs.members, strict=False)
        return len(ours.members) == len(theirs.members) and all(_same(*pair, tolerance) for pair in pairs)
    within = lambda each, others: any(_same(each, other, tolerance) for other in others)
    return all(within(each, theirs.members) for each in ours.members) and all(
        within(each, ours.members) for each in theirs.members
    )


def parsed(text: str) -> Answer:
    """The value that a text stands for."""
    plain = _plain(text)
    if sum(map(plain.count, "([{")) > _MOST_BRACKETS:
        return plain.lower()
    if match := re.fullmatch(r"[a-zA-Z]\w*(?:=|∈)(.+)", plain):
        plain = match[1]
    for read in (_set, _interval, _number):
        if (found := read(plain)) is not None:
            return found
    parts = _split(plain)
    if len(parts) > 1:  # "1, 2" without brackets names all solutions
        return Members(tuple(map(parsed, parts)), is_set=True)
    return plain.lower()


def _plain(text: str) -> str:
    """Text without LaTeX's ways of laying it out, and without spaces."""
    plain = text.strip().strip("$").rstrip(".")
    for old, new in (
        ("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\;", ""), ("\\ ", " "), ("\\%", "%"),
        ("\\$", "$"),
        ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cdot", "*"), ("\\times", "*"), ("\\infty", "inf"),
        ("^{\\circ}", "°"), ("^\\circ", "°"), ("\\{", "{"), ("\\}", "}"), ("\\in ", "∈"),
        ("\N{MINUS SIGN}", "-"), ("\\pi", "pi"),
    ):  # fmt: skip
        plain = plain.replace(old, new)
    plain = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{\s*([^{}]*?)\s*\}", r" \1", plain)
    plain = re.sub(r"(\d)(?:\s+(?=\d+/\d)|\s*(?=\\frac))", r"\1_", plain)  # a mixed number keeps its gap
    plain = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)", plain)
    plain = re.sub(r"\(([+-]?[\d.,]+)\)/\(([+-]?[\d.,]+)\)", r"\1/\2", plain)
    return re.sub(r"\s+", "", plain)


def _set(plain: str) -> Answer | None:
    if not (plain.startswith("{") and plain.endswith("}")):
        return None
    parts = _split(plain[1:-1]) if plain[1:-1] else []
    return Members(tuple(map(parsed, parts)), is_set=True)


def _interval(plain: str) -> Answer | None:
    if len(plain) < 2 or plain[0] not in "([" or plain[-1] not in ")]":
        return None
    parts = _split(plain[1:-1])
    members = tuple(map(parsed, parts))
    if len(parts) == 2 and (plain[0] == "[" or plain[-1] == "]") and (plain[0], plain[-1]) != ("[", "]"):
        return Interval(*members, holds_low=plain[0] == "[", holds_high=plain[-1] == "]")
    if len(parts) == 2 and (plain[0], plain[-1]) == ("[", "]"):
        return Interval(*members, holds_low=True, holds_high=True)
    if len(parts) == 2 and any("inf" in part for part in parts):
        return Interval(*members, holds_low=False, holds_high=False)
    return Members(members, is_set=False) if len(parts) > 1 else None


def _split(plain: str) -> list[str]:
    """Parts between commas that no bracket encloses; a comma within a number such as 1,000 is none."""
    parts, depth, begin = list[str](), 0, 0
    for place, letter in enumerate(plain):
        depth += (letter in "([{") - (letter in ")]}")
        thousands = re.fullmatch(r"[+-]?\d{1,3}(,\d{3})*", plain[begin:place]) and re.match(
            r",\d{3}(?!\d)", plain[place:]
        )
        if letter in ",;" and depth == 0 and not thousands:
            parts.append(plain[begin:place])
            begin = place + 1
    return [*parts, plain[begin:]]


def _number(plain: str) -> Number | None:
    unit = None
    if match := re.fullmatch(rf"([$€])({_NUMBER})", plain):
        unit, plain = match[1], match[2]
    elif match := re.fullmatch(rf"({_NUMBER}(?:_\d+/\d+|/\d+(?:\.\d+)?)?)(%|°|[a-zA-Z€]+)", plain):
        plain, unit = match[1], match[2]
    value = _value(plain)
    if value is None or unit is None:
        return None if value is None else Number(value)
    if unit == "%":
        return Number(value / 100)
    name = unit.lower()
    singular = name if name in _WORDS or len(name) < 4 else name.removesuffix("es" if name == "inches" else "s")
    name = _WORDS.get(singular, singular)
    for quantity, units in _UNITS.items():
        if name in units:
            return Number(value, quantity, Fraction(units[name]))
    return Number(value, name) if len(name) > 1 else None  # "5 apples"; "5x" is no number


def _value(plain: str) -> Fraction | None:
    if match := re.fullmatch(r"([+-]?\d+)_(\d+)/(\d+)", plain):
        whole, part = Fraction(match[1]), _ratio(match[2], match[3])
        return None if part is None else whole - part if match[1].startswith("-") else whole + part
    if match := re.fullmatch(rf"({_NUMBER})/({_NUMBER})", plain):
        return _ratio(match[1], match[2])
    return _decimal(plain)


def _ratio(above: str, below: str) -> Fraction | None:
    top, bottom = _decimal(above), _decimal(below)
    return None if top is None or not bottom else top / bottom


def _decimal(plain: str) -> Fraction | None:
    if not re.fullmatch(_NUMBER, plain) or not any(letter.isdigit() for letter in plain) or len(plain) > 64:
        return None
    exponent = re.search(r"[eE][+-]?(\d+)$", plain)
    if exponent and int(exponent[1]) > 64:  # so that no answer is a number of a million digits
        return None
    return Fraction(plain.replace(",", ""))
