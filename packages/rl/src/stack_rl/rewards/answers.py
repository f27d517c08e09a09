"""Extraction of mathematical answers from text, and their comparison by value."""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Final

from stack_rl.rewards.algebra import Expression, Unreadable, number, symbol
from stack_rl.rewards.expressions import plain
from stack_rl.rewards.reading import Answer, Interval, Members, Named, Quantity, Relation, Union, Words, read
from stack_rl.rewards.units import DEGREE

__all__ = ["extract", "is_same"]

# "answer is", "answer is:" or "answer:", then spaces and the bold marks of Markdown.
_STATING: Final = re.compile(r"(?i)\banswer\s*(?:is\b\s*[:=]?|[:=]+)[\s*]*")


def extract(text: str) -> str | None:
    r"""Extracts the final answer of a text.

    Tries the last \boxed{}, then the rest of the line after "####", "answer is" or "answer:", then a text that is a
    single line of at most four words. Other texts contain no answer and give None.
    """
    if "\\boxed{" in text or "\\fbox{" in text:
        return _last_boxed(text)
    # Solutions of GSM8K end with `#### answer`.
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0] or None
    if stating := list(_STATING.finditer(text)):
        # Answers in Minerva's few-shot prompt end with this sentence (arXiv:2206.14858).
        line = text[stating[-1].end() :].partition("\n")[0].removesuffix(" I hope it is correct.")
        return line.strip().rstrip(".*").strip() or None
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
    return None  # the text was cut off


def is_same(left: str, right: str, *, tolerance: float = 0.0) -> bool | None:
    """Compares the values of two answers: True if equal, False if different, None if undecided.

    A comparison is undecided if an answer cannot be parsed completely, or if the equality is beyond exact arithmetic,
    such as sin(x)^2 = 1 - cos(x)^2. If only one answer has a unit, the same unit is assumed for the other.

    Args:
      left: the policy's answer.
      right: the reference answer.
      tolerance: maximum difference of two numbers, relative to the reference.
    """
    # Equal texts are equal even if they cannot be parsed, but empty ones state no answer.
    if plain(left) == plain(right):
        return bool(plain(left)) or None
    pair = read(left), read(right)
    if pair[0] is None or pair[1] is None:
        return None
    try:
        return _same(pair[0], pair[1], Fraction(tolerance))
    except Unreadable:  # their difference is too large to compute
        return None


def _same(left: Answer, right: Answer, tolerance: Fraction) -> bool | None:
    if isinstance(left, Named) or isinstance(right, Named):
        return _same_named(left, right, tolerance)
    match left, right:
        case Quantity(), Quantity():
            return _same_quantities(left, right, tolerance)
        case Words(), Words():
            return left == right
        case Relation(), Relation():
            return _same_relations(left, right)
        case (Members() as several, Quantity()) | (Quantity(), Members() as several):
            return None if len(several.members) == 1 else False
    return _same_brackets(left, right, tolerance)


def _same_named(left: Answer, right: Answer, tolerance: Fraction) -> bool | None:
    """Compares values of variables; an unnamed value matches any variable."""
    if isinstance(left, Named) and isinstance(right, Named):
        return left.name == right.name and _same(left.value, right.value, tolerance)
    if isinstance(left, Relation) or isinstance(right, Relation):
        return _same_relations(_as_relation(left), _as_relation(right))
    left, right = (each.value if isinstance(each, Named) else each for each in (left, right))
    return _same(left, right, tolerance)


def _same_brackets(left: Answer, right: Answer, tolerance: Fraction) -> bool | None:
    match left, right:
        case (Interval(), Quantity()) | (Quantity(), Interval()):
            return False
        case Union(), Union():
            return _same_sets(left.parts, right.parts, tolerance) or None  # different parts may form the same union
        case Interval(), Interval():
            ends = left.has_low == right.has_low and left.has_high == right.has_high
            pairs = ((left.low, right.low), (left.high, right.high))
            return _all([ends, *(_same(*pair, tolerance) for pair in pairs)])
        case Members(), Members():
            return _same_members(left, right, tolerance)
        case (Members() as point, Interval() as interval) | (Interval() as interval, Members() as point):
            is_open = not (interval.has_low or interval.has_high)  # (1, 2) may be a point or an open interval
            ends = Members((interval.low, interval.high), is_set=False)
            return _all([is_open, _same_members(point, ends, tolerance)])
    return None


def _same_quantities(left: Quantity, right: Quantity, tolerance: Fraction) -> bool | None:
    if left.unit and right.unit:
        if left.unit.dimensions != right.unit.dimensions:
            return False
        scale = number(left.unit.scale / right.unit.scale)
        return _same_values(left.value * scale, right.value, tolerance)
    for one, other in ((left, right), (right, left)):
        if one.unit and not one.is_certain:  # only one answer has a unit, so its letters may be variables
            return (one.product is not None and _same_values(one.product, other.value, tolerance)) or None
        # Without a unit, an angle may be in degrees or in radians: 90° equals both 90 and pi/2.
        if one.unit == DEGREE:
            radians = one.value * symbol("pi") / number(180)
            return _any([_same_values(each, other.value, tolerance) for each in (one.value, radians)])
    return _same_values(left.value, right.value, tolerance)


def _same_values(left: Expression, right: Expression, tolerance: Fraction) -> bool | None:
    same = left.equals(right)
    if same is False and tolerance:
        if left.rational is not None and right.rational is not None:
            return abs(left.rational - right.rational) <= tolerance * abs(right.rational)
        pair = left.approximation(), right.approximation()
        if pair[0] is not None and pair[1] is not None:
            return abs(pair[0] - pair[1]) <= tolerance * abs(pair[1])
    return None if same is False and str(left).lower() == str(right).lower() else same  # x and X


def _as_relation(answer: Answer) -> Answer:
    """Converts a named value such as `x = 4` to an equation."""
    match answer:
        case Named(name, Quantity(value, None)) if len(name) == 1:
            return Relation("=", symbol(name) - value)
    return answer


def _same_relations(left: Answer, right: Answer) -> bool | None:
    """Returns True if two relations are multiples of each other, else None, because their solutions may still agree."""
    if not isinstance(left, Relation) or not isinstance(right, Relation):
        return None
    if left.symbol != right.symbol or not left.difference.top or not right.difference.top:
        return None
    factor = (left.difference / right.difference).constant
    if factor is None:
        return None
    return True if factor > 0 or left.symbol in "=≠" else None


def _same_members(left: Members, right: Members, tolerance: Fraction) -> bool | None:
    if left.is_set != right.is_set:
        return False
    if left.is_set:
        return _same_sets(left.members, right.members, tolerance)
    pairs = zip_longest(left.members, right.members)
    return _all([a is not None and b is not None and _same(a, b, tolerance) for a, b in pairs])


def _same_sets(left: Sequence[Answer], right: Sequence[Answer], tolerance: Fraction) -> bool | None:
    """Returns whether two sets have the same members."""
    both = [(each, right) for each in left] + [(each, left) for each in right]
    return _all([_any([_same(each, other, tolerance) for other in others]) for each, others in both])


# Kleene's three-valued logic, in which None is undecided.
def _all(found: Iterable[bool | None]) -> bool | None:
    values = set(found)
    return False if False in values else None if None in values else True


def _any(found: Iterable[bool | None]) -> bool | None:
    values = set(found)
    return True if True in values else None if None in values else False
