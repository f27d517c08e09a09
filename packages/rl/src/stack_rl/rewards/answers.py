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

_STATING: Final = re.compile(r"(?i)\banswer\s*(?:is\b\s*[:=]?|[:=]+)[\s*]*")


def extract(text: str) -> str | None:
    r"""Extracts the final answer of a text.

    Tries the last \boxed{}, then the rest of the line after "####", "answer is" or "answer:", then a text that is a
    single line of at most four words. Other texts contain no answer and give None.
    """
    if "\\boxed{" in text or "\\fbox{" in text:
        return _last_boxed(text)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0] or None
    if stating := list(_STATING.finditer(text)):
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


def is_same(ours: str, theirs: str, *, tolerance: float = 0.0) -> bool | None:
    """Compares the values of two answers: True if equal, False if different, None if undecided.

    A comparison is undecided if an answer cannot be parsed completely, or if the equality is beyond exact arithmetic,
    such as sin(x)^2 = 1 - cos(x)^2. If only one answer has a unit, the same unit is assumed for the other.

    Args:
      ours: the policy's answer.
      theirs: the reference answer.
      tolerance: maximum difference of two numbers, relative to the reference.
    """
    if plain(ours) == plain(theirs):
        return bool(plain(ours)) or None
    pair = read(ours), read(theirs)
    if pair[0] is None or pair[1] is None:
        return None
    try:
        return _same(pair[0], pair[1], Fraction(tolerance))
    except Unreadable:  # their difference is too large to compute
        return None


def _same(ours: Answer, theirs: Answer, tolerance: Fraction) -> bool | None:
    if isinstance(ours, Named) or isinstance(theirs, Named):
        return _same_named(ours, theirs, tolerance)
    match ours, theirs:
        case Quantity(), Quantity():
            return _same_quantities(ours, theirs, tolerance)
        case Words(), Words():
            return ours == theirs
        case Relation(), Relation():
            return _same_relations(ours, theirs)
        case (Members() as several, Quantity()) | (Quantity(), Members() as several):
            return None if len(several.members) == 1 else False
    return _same_brackets(ours, theirs, tolerance)


def _same_named(ours: Answer, theirs: Answer, tolerance: Fraction) -> bool | None:
    """Compares values of variables; an unnamed value matches any variable."""
    if isinstance(ours, Named) and isinstance(theirs, Named):
        return ours.name == theirs.name and _same(ours.value, theirs.value, tolerance)
    if isinstance(ours, Relation) or isinstance(theirs, Relation):
        return _same_relations(_as_relation(ours), _as_relation(theirs))
    ours, theirs = (each.value if isinstance(each, Named) else each for each in (ours, theirs))
    return _same(ours, theirs, tolerance)


def _same_brackets(ours: Answer, theirs: Answer, tolerance: Fraction) -> bool | None:
    match ours, theirs:
        case (Interval(), Quantity()) | (Quantity(), Interval()):
            return False
        case Union(), Union():
            return _same_sets(ours.parts, theirs.parts, tolerance) or None  # different parts may form the same union
        case Interval(), Interval():
            ends = ours.has_low == theirs.has_low and ours.has_high == theirs.has_high
            pairs = ((ours.low, theirs.low), (ours.high, theirs.high))
            return _all([ends, *(_same(*pair, tolerance) for pair in pairs)])
        case Members(), Members():
            return _same_members(ours, theirs, tolerance)
        case (Members() as point, Interval() as interval) | (Interval() as interval, Members() as point):
            is_open = not (interval.has_low or interval.has_high)  # (1, 2) may be a point or an open interval
            ends = Members((interval.low, interval.high), is_set=False)
            return _all([is_open, _same_members(point, ends, tolerance)])
    return None


def _same_quantities(ours: Quantity, theirs: Quantity, tolerance: Fraction) -> bool | None:
    if ours.unit and theirs.unit:
        if ours.unit.dimensions != theirs.unit.dimensions:
            return False
        scale = number(ours.unit.scale / theirs.unit.scale)
        return _same_values(ours.value * scale, theirs.value, tolerance)
    for one, other in ((ours, theirs), (theirs, ours)):
        if one.unit and not one.is_certain:  # only one answer has a unit, so its letters may be variables
            return (one.product is not None and _same_values(one.product, other.value, tolerance)) or None
        if one.unit == DEGREE:
            radians = one.value * symbol("pi") / number(180)
            return _any([_same_values(each, other.value, tolerance) for each in (one.value, radians)])
    return _same_values(ours.value, theirs.value, tolerance)


def _same_values(ours: Expression, theirs: Expression, tolerance: Fraction) -> bool | None:
    same = ours.equals(theirs)
    if same is False and tolerance:
        if ours.rational is not None and theirs.rational is not None:
            return abs(ours.rational - theirs.rational) <= tolerance * abs(theirs.rational)
        pair = ours.approximation(), theirs.approximation()
        if pair[0] is not None and pair[1] is not None:
            return abs(pair[0] - pair[1]) <= tolerance * abs(pair[1])
    return None if same is False and str(ours).lower() == str(theirs).lower() else same  # x and X


def _as_relation(answer: Answer) -> Answer:
    """Converts a named value such as `x = 4` to an equation."""
    match answer:
        case Named(name, Quantity(value, None)) if len(name) == 1:
            return Relation("=", symbol(name) - value)
    return answer


def _same_relations(ours: Answer, theirs: Answer) -> bool | None:
    """Returns True if two relations are multiples of each other, else None, because their solutions may still agree."""
    if not isinstance(ours, Relation) or not isinstance(theirs, Relation):
        return None
    if ours.symbol != theirs.symbol or not ours.difference.top or not theirs.difference.top:
        return None
    factor = (ours.difference / theirs.difference).constant
    if factor is None:
        return None
    return True if factor > 0 or ours.symbol in "=≠" else None


def _same_members(ours: Members, theirs: Members, tolerance: Fraction) -> bool | None:
    if ours.is_set != theirs.is_set:
        return False
    if ours.is_set:
        return _same_sets(ours.members, theirs.members, tolerance)
    pairs = zip_longest(ours.members, theirs.members)
    return _all([a is not None and b is not None and _same(a, b, tolerance) for a, b in pairs])


def _same_sets(ours: Sequence[Answer], theirs: Sequence[Answer], tolerance: Fraction) -> bool | None:
    """Returns whether two sets have the same members."""
    both = [(each, theirs) for each in ours] + [(each, ours) for each in theirs]
    return _all([_any([_same(each, other, tolerance) for other in others]) for each, others in both])


def _all(found: Iterable[bool | None]) -> bool | None:
    values = set(found)
    return False if False in values else None if None in values else True


def _any(found: Iterable[bool | None]) -> bool | None:
    values = set(found)
    return True if True in values else None if None in values else False
