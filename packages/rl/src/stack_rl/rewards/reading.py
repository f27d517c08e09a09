r"""Parser of mathematical answers: numbers, expressions, sets, tuples, intervals, unions, equations and words.

`read` parses a complete text or returns None: for text that it does not fully understand, and for ambiguous text
(`1/2x`, `5 6`, `x2`). No text is ever evaluated as a program.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from stack_rl.rewards.algebra import Expression, Unreadable, number
from stack_rl.rewards.expressions import FUNCTIONS, GREEK, Token, is_infinite, plain, read_expression, tokenize
from stack_rl.rewards.units import Unit, read_unit

__all__ = ["Answer", "Interval", "Members", "Named", "Quantity", "Relation", "Union", "Words", "read"]


@dataclass(frozen=True)
class Quantity:
    """A number or an expression with an optional unit.

    Attributes:
      value: the number or expression.
      unit: unit of the value, or None.
      is_certain: False if the unit's letters may be variables, as in `5 m`.
      product: value of the complete text with those letters as variables, or None if that cannot be parsed.
    """

    value: Expression
    unit: Unit | None = None
    is_certain: bool = True
    product: Expression | None = None


@dataclass(frozen=True)
class Interval:
    """An interval; its ends may be infinite."""

    low: "Answer"
    high: "Answer"
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Members:
    """A set, which ignores order and repetition, or a tuple."""

    members: tuple["Answer", ...]
    is_set: bool


@dataclass(frozen=True)
class Union:
    """A union of intervals and sets."""

    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Named:
    """The value of a variable: `x = 4`."""

    name: str
    value: "Answer"


@dataclass(frozen=True)
class Relation:
    """An equation or inequality: `difference` is equal to, unequal to, less than or at most 0."""

    symbol: str
    difference: Expression


@dataclass(frozen=True)
class Words:
    """An answer in words, in lower case."""

    text: str


Answer = Quantity | Interval | Members | Union | Named | Relation | Words


# Bounds for the recursion of the parser, which thousands of brackets would exhaust.
_MAX_LETTERS: Final = 1000
_MAX_BRACKETS: Final = 32
_OPENING, _CLOSING = "([{", ")]}"
_JOINING: Final = ("or", "and")
_RELATIONS: Final = "=≠<>≤≥∈"
# Words that are short enough for a product of variables, but are answers.
_SHORT_WORDS: Final = frozenset(("yes", "no", "true", "none", "dne"))
_EMPTY: Final = frozenset(("no solution", "no solutions", "empty set", "the empty set"))


def read(text: str) -> Answer | None:
    """Parses a complete text; returns None if any part is ambiguous or not understood."""
    if len(text) > _MAX_LETTERS:
        return None
    found = plain(text)
    if sum(map(found.count, _OPENING)) > _MAX_BRACKETS:
        return None
    try:
        return _list(list(tokenize(found)), is_inner=False)
    except Unreadable:
        return None


def _list(tokens: list[Token], *, is_inner: bool) -> Answer:
    """Parses one item, or a list without brackets, which is the set of all solutions."""
    parts = _parts(tokens, is_inner=is_inner)
    if len(parts) == 1:
        return _item(parts[0])
    return Members(_without_name(list(map(_item, parts))), is_set=True)


def _without_name(items: list[Answer]) -> tuple[Answer, ...]:
    """Drops the name in "x = 1 or x = 2" if all items have the same name."""
    names = {each.name if isinstance(each, Named) else None for each in items}
    return tuple(each.value if isinstance(each, Named) and len(names) == 1 else each for each in items)


def _parts(tokens: list[Token], *, is_inner: bool) -> list[list[Token]]:
    """Splits tokens at commas, semicolons, "or" and "and" outside brackets.

    Outside brackets, a comma without spaces before three digits groups thousands: `3,100` is a number, `3, 100` a list.
    Inside brackets it groups only if another comma there is followed by a space; otherwise `(1,200)` has two members.
    """
    commas = [at for at, depth in _depths(tokens) if depth == 0 and tokens[at].text == ","]
    groups = not is_inner or any(tokens[at + 1].is_spaced for at in commas if at + 1 < len(tokens))
    # `joined` has the indices of digit groups that were appended to the preceding number.
    parts, joined = [list[Token]()], set[int]()
    for at, depth in _depths(tokens):
        token = tokens[at]
        if at in commas and groups and _is_tight(tokens, at):
            if _groups_thousands(tokens, at, follows_group=at - 1 in joined):
                parts[-1][-1] = Token("number", parts[-1][-1].text + tokens[at + 1].text, parts[-1][-1].is_spaced)
                joined.add(at + 1)
                continue
            if at - 1 in joined:
                raise Unreadable("a comma that may group digits or separate numbers")
        if at in joined:
            continue
        if depth == 0 and (token.text in (",", ";") or (token.kind in ("word", "upright") and token.text in _JOINING)):
            is_repeated = at > 0 and tokens[at - 1].text == "," and token.text in _JOINING  # ", and"
            parts += [] if is_repeated else [[]]
            continue
        parts[-1].append(token)
    return parts


def _is_tight(tokens: list[Token], at: int) -> bool:
    around = tokens[max(at - 1, 0) : at + 2]
    return len(around) == 3 and not tokens[at].is_spaced and not tokens[at + 1].is_spaced and around[0].kind == "number"


def _groups_thousands(tokens: list[Token], at: int, *, follows_group: bool) -> bool:
    before, after = tokens[at - 1].text, tokens[at + 1].text
    begins = bool(re.fullmatch(r"\d{3}" if follows_group else r"[1-9]\d{0,2}", before))
    return begins and tokens[at + 1].kind == "number" and bool(re.fullmatch(r"\d{3}(?:\.\d+)?", after))


def _depths(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """Yields the index and bracket depth of each token; a bracket counts as inside itself."""
    depth = 0
    for at, token in enumerate(tokens):
        is_symbol = token.kind == "symbol"
        depth += is_symbol and token.text in _OPENING
        yield at, depth
        depth -= is_symbol and token.text in _CLOSING
        if depth < 0:
            raise Unreadable("a closing bracket without an opening one")
    if depth:
        raise Unreadable("a bracket that is not closed")


def _item(tokens: list[Token]) -> Answer:
    if not tokens:
        raise Unreadable("nothing between two separators")
    # The upper signs belong together, and so do the lower ones: `a ± b ∓ c` has two values, not four.
    if any(token.text in "±∓" for token in tokens):
        signs = ({"±": "+", "∓": "-"}, {"±": "-", "∓": "+"})
        variants = [[each._replace(text=swap.get(each.text, each.text)) for each in tokens] for swap in signs]
        return Members(_without_name(list(map(_item, variants))), is_set=True)
    # Relations come first, because `x \in A \cup B` is a relation whose right side is a union.
    for separators, make in ((_RELATIONS, _relation), ("\N{UNION}", _union)):
        places = [at for at, depth in _depths(tokens) if depth == 0 and tokens[at].text in separators]
        if places:
            return make(tokens, places)
    if (words := _words(tokens)) is not None:
        return Members((), is_set=True) if words in _EMPTY else Words(words)
    return _sequence(tokens) or _quantity(tokens)


def _relation(tokens: list[Token], places: list[int]) -> Answer:
    if len(places) > 1:
        raise Unreadable("more than one sign of relation")
    left, sign, right = tokens[: places[0]], tokens[places[0]].text, tokens[places[0] + 1 :]
    if sign in "=∈" and (name := _name(left)) is not None:
        return Named(name, _item(right))
    if sign == "∈":
        raise Unreadable("an element that is not a variable")
    # Only < and ≤ remain, which makes `a > b` and `b < a` the same relation.
    if sign in ">≥":
        left, right, sign = right, left, {">": "<", "≥": "≤"}[sign]
    return Relation(sign, read_expression(left) - read_expression(right))


def _name(tokens: list[Token]) -> str | None:
    """Returns the variable name formed by tokens such as `x`, `x_1` or `f(x)`; None for other tokens."""
    text = "".join(token.text for token in tokens)
    is_name = re.fullmatch(r"[A-Za-z](_\{?\w+\}?)?(\([A-Za-z](,[A-Za-z])*\))?", text)
    return text if is_name or (len(tokens) == 1 and text in GREEK) else None


def _union(tokens: list[Token], places: list[int]) -> Answer:
    ends = [-1, *places, len(tokens)]
    return Union(tuple(_as_open(_sequence(tokens[first + 1 : last])) for first, last in pairwise(ends)))


def _as_open(part: Answer | None) -> Answer:
    """Converts a pair in a union, such as `(0, 1)`, to an open interval."""
    if isinstance(part, Members) and not part.is_set:
        if len(part.members) != 2:
            raise Unreadable("a tuple in a union")
        return Interval(*part.members, has_low=False, has_high=False)
    if part is None:
        raise Unreadable("a union of parts that are not sets")
    return part


def _words(tokens: list[Token]) -> str | None:
    """Parses an answer in words; returns None if the letters may be a product of variables."""
    words = [token.text for token in tokens]
    if any(token.kind not in ("word", "upright") for token in tokens):
        return None
    is_long = any(len(word) > 3 and word not in FUNCTIONS for word in words) or "".join(words).lower() in _SHORT_WORDS
    return " ".join(words).lower() if is_long else None


def _sequence(tokens: list[Token]) -> Answer | None:
    """Parses a set, a tuple or an interval; returns None if the brackets belong to an expression."""
    if len(tokens) < 2 or tokens[0].text not in _OPENING or tokens[-1].text not in _CLOSING:
        return None
    if not _is_enclosed(tokens):
        return None
    opening, closing = tokens[0].text, tokens[-1].text
    if (opening == "{") != (closing == "}"):
        raise Unreadable("mismatched brackets")
    inner = tokens[1:-1]
    parts = _parts(inner, is_inner=True) if inner else []
    if opening == "{":
        return Members(_without_name(list(map(_item, parts))), is_set=True)
    if len(parts) < 2:
        return None
    members = tuple(map(_item, parts))
    has_infinity = any(isinstance(each, Quantity) and is_infinite(each.value) for each in members)
    if len(members) == 2 and ((opening, closing) != ("(", ")") or has_infinity):
        return Interval(*members, has_low=opening == "[", has_high=closing == "]")
    if (opening == "(") != (closing == ")"):
        raise Unreadable("mismatched brackets")
    return Members(members, is_set=False)


def _is_enclosed(tokens: list[Token]) -> bool:
    """Returns whether the last token closes the first bracket."""
    depth = 0
    for at, token in enumerate(tokens):
        if token.kind == "symbol":
            depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth == 0:
            return at == len(tokens) - 1
    return False


def _quantity(tokens: list[Token]) -> Quantity:
    """Parses an expression with its unit."""
    if tokens[0].text in "$€" and len(tokens) > 1:
        return Quantity(read_expression(tokens[1:]), read_unit([tokens[0].text]))
    if tokens[-1].text in ("%", "percent") and len(tokens) > 1:
        return Quantity(read_expression(tokens[:-1]) / number(100))
    for cut in range(1, len(tokens)):
        before, first = tokens[cut - 1], tokens[cut]
        unit = read_unit([token.text for token in tokens[cut:]])
        if unit is None or not (before.kind == "number" or before.text in ")}"):
            continue
        is_word = first.kind == "word" and first.text.isalpha()
        # `5 \text{m}`, `5 meters` and `5 cm` are certain; `5 m` and `5cm` may also be products of variables.
        if not is_word or len(first.text) > 3 or (first.is_spaced and len(first.text) > 1):
            return Quantity(read_expression(tokens[:cut]), unit)
        try:
            product = read_expression(tokens)
        except Unreadable:
            product = None
        return Quantity(read_expression(tokens[:cut]), unit, is_certain=False, product=product)
    return Quantity(read_expression(tokens))
