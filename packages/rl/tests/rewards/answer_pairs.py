"""Pairs of mathematical answers whose equality is known by construction, for rewards that compare them."""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Pair", "pairs"]

LETTERS = "abcdhntuvwxz"  # no two of them are a unit; t and h alone are
UNITS = (
    "cm",
    "m",
    "kg",
    "cm^2",
    r"\text{ cm}",
    r"\text{ m}",
    r"\text{ kg}",
    r"\text{ cm}^2",
    " minutes",
    " hours",
    "°",
)
AROUND = (
    "{} or {}", "{} and {}", "{} to {}", "{}, {}", "{} - {}", "{}/{}", "{} {}", "{}^{}", "{}_{}", "{}:{}", "{} < {}",
    r"{} \pmod {{{}}}", r"{} \text{{ or }} {}", "({}, {})", "[{}, {}]", r"\{{{}, {}\}}", r"\frac{{{}}}{{{}}}", "{}; {}",
)  # fmt: skip
BESIDE = (
    "{} or more", "not {}", "about {}", "at least {}", "less than {}", "{}?", "{}!", "-{}", "{}%", "{}i", "|{}", "{}-",
    "{})", "({}", r"\pm {}", r"\sqrt{{{}}}", r"\sin({})", r"\frac{{1}}{{{}}}", r"{}\text{{ million}}", "{} dozen",
    "x > {}", r"{}\text{{ or more}}", r"\text{{at least }} {}", r"x \neq {}", "{}.5", "0.{}", "{}e2", "{}...",
    "{} degrees Fahrenheit",
)  # fmt: skip


class Pair(NamedTuple):
    """An answer, the right answer, and whether the answer is worth a reward."""

    kind: str
    answer: str
    right: str
    is_equal: bool


def pairs(seed: int = 0, *, rounds: int = 6) -> list[Pair]:
    """Generates pairs of every kind, about half of them equal."""
    random_ = random.Random(seed)
    kinds = (
        _units,
        _variables,
        _pi,
        _roots,
        _fractions,
        _sets,
        _tuples,
        _intervals,
        _unions,
        _percent,
        _thousands,
        _texts,
    )
    return [Pair(kind.__name__[1:], *found) for _ in range(rounds) for kind in kinds for found in kind(random_)]


Found = Iterator[tuple[str, str, bool]]


def _units(random_: random.Random) -> Found:
    number = random_.randint(2, 99)
    one, other = random_.sample(UNITS, 2)
    if re.sub(r"\\text|[{} ]", "", one) != re.sub(r"\\text|[{} ]", "", other):
        yield f"{number}{one}", f"{number}{other}", False
    yield f"{number}00 cm", rf"{number}\text{{ m}}", True
    yield f"{number} m", f"{number}00 cm", True
    yield rf"{number}\text{{ km/h}}", rf"{number}000\text{{ m}}/\text{{h}}", True
    yield f"{number} cm", rf"{number}\text{{ cm}}^3", False


def _variables(random_: random.Random) -> Found:
    number, other = random_.sample(range(2, 30), 2)
    first, second = random_.sample(LETTERS, 2)
    for letters in (first, first + second, first + second + random_.choice(LETTERS), f"{first}^2"):
        yield f"{number}{letters}", str(number), False
        yield str(number), f"{number} {letters}", False
    yield f"{number}{first}+{other}", f"{other} + {number} {first}", True
    yield f"{number}{first}+{other}", f"{number}{second}+{other}", False
    yield rf"{first} = {number}, {second} = {other}", f"{first}={other}, {second}={number}", False
    yield rf"{first} = {number}, {second} = {other}", f"{second}={other} and {first}={number}", True
    yield f"({first}+{number})({first}-{number})", rf"{first}^2 - {number**2}", True


def _pi(random_: random.Random) -> Found:
    number = random_.randint(2, 99)
    yield rf"{number}\pi", str(number), False
    yield str(number), rf"\frac{{{number}}}{{\pi}}", False
    yield f"{number * 3.14159:.5f}", rf"{number}\pi", False
    yield f"{number} pi", rf"\pi \cdot {number}", True
    yield rf"\frac{{{number}\pi}}{{2}}", f"{number}/2 * \N{GREEK SMALL LETTER PI}", True


def _roots(random_: random.Random) -> Found:
    factor, root = random_.randint(2, 12), random_.choice((2, 3, 5, 6, 7, 10))
    yield rf"{factor}\sqrt{{{root}}}", str(factor), False
    yield rf"{factor}\sqrt{{{root}}}", str(factor * root), False
    yield rf"\sqrt{{{factor**2 * root}}}", rf"{factor}\sqrt{{{root}}}", True
    yield rf"\frac{{{factor}}}{{\sqrt{{{root}}}}}", rf"\frac{{{factor}\sqrt{{{root}}}}}{{{root}}}", True
    yield (
        rf"\frac{{{factor}}}{{\sqrt{{{root}}} - 1}}",
        rf"\frac{{{factor}\sqrt{{{root}}} + {factor}}}{{{root - 1}}}",
        True,
    )
    yield rf"{factor}+\sqrt{{{root}}}", rf"{factor}-\sqrt{{{root}}}", False
    yield rf"\sqrt[3]{{{factor**3}}}", str(factor), True
    yield f"{factor * root**0.5:.6f}", rf"{factor}\sqrt{{{root}}}", False


def _fractions(random_: random.Random) -> Found:
    above, below = random_.sample((*range(2, 10), *range(11, 20)), 2)
    yield f"{above}/{below}", f"{below}/{above}", False
    yield rf"\frac{{{above}}}{{{below}}}", f"{2 * above} / {2 * below}", True
    yield f"{above} 1/{below}", f"{above}1/{below}", False
    yield rf"{above}\frac{{1}}{{{below}}}", rf"\frac{{{above * below + 1}}}{{{below}}}", True
    yield f"{above / below:.4f}", f"{above}/{below}", (above * 10_000) % below == 0
    yield rf"-\frac{{{above}}}{{{below}}}", rf"\frac{{{above}}}{{{below}}}", False


def _sets(random_: random.Random) -> Found:
    first, second, third = random_.sample(range(-20, 20), 3)
    yield rf"\{{{first}, {second}\}}", rf"\{{{first}, {third}\}}", False
    yield rf"\{{{first}, {second}\}}", f"{{{second}, {first}, {first}}}", True
    yield f"{first}, {second}", rf"x = {second} \text{{ or }} x = {first}", True
    yield f"{first}, {second}", f"{first}, {second}, {third}", False
    yield rf"\{{{first}, {second}\}}", f"({first}, {second})", False


def _tuples(random_: random.Random) -> Found:
    first, second, third = random_.sample(range(-20, 20), 3)
    yield f"({first}, {second})", f"({second}, {first})", False
    yield f"({first}, {second})", rf"\left({first},\frac{{{2 * second}}}{{2}}\right)", True
    yield f"({first}, {second}, {third})", f"({first}, {third}, {second})", False
    yield f"({first}, {second})", f"({first}, {second}, {third})", False
    yield f"({first}, {second})", str(first), False


def _interval(random_: random.Random, low: int, high: int) -> tuple[str, str]:
    """An interval, and another that differs in one of its ends."""
    opening, closing = random_.choice("(["), random_.choice(")]")
    end = f"{low}, {high}"
    others = {
        f"{'(['[opening == '(']}{end}{closing}",
        f"{opening}{end}{')]'[closing == ')']}",
        f"{opening}{end}1{closing}",
    }
    return f"{opening}{end}{closing}", random_.choice(sorted(others))


def _intervals(random_: random.Random) -> Found:
    low = random_.randint(-20, 20)
    right, wrong = _interval(random_, low, low + random_.randint(1, 9))
    yield right, wrong, False
    yield right, rf"\left{right[:-1]}\right{right[-1]}".replace(", ", ","), True
    yield rf"x \in {right}", right, True
    yield rf"(-\infty, {low}]", rf"(-\infty, {low})", False
    yield rf"({low}, \infty)", f"({low}, inf)", True
    yield right, str(low), False


def _unions(random_: random.Random) -> Found:
    low = random_.randint(-20, 20)
    (right, wrong), (other, _) = _interval(random_, low, low + 2), _interval(random_, low + 3, low + 9)
    yield rf"{right} \cup {other}", rf"{wrong} \cup {other}", False
    yield rf"{right} \cup {other}", rf"{other} U {right}".replace(", ", ","), True
    yield rf"{right} \cup {other}", right, False
    yield right, rf"{right} \cup \{{{low + 20}\}}", False


def _percent(random_: random.Random) -> Found:
    number = random_.randint(2, 99)
    yield f"{number}%", str(number), False
    yield rf"{number}\%", f"{number / 100}", True
    yield rf"{number}\%", rf"\frac{{{number}}}{{100}}", True
    yield f"{number}%", f"{number + 1}%", False


def _thousands(random_: random.Random) -> Found:
    first, rest = random_.randint(1, 999), random_.randint(100, 999)
    yield f"{first}, {rest}", f"{first}{rest}", False
    yield f"({first},{rest})", f"{first}{rest}", False
    yield rf"\{{{first},{rest}\}}", f"{first}{rest}", False
    yield f"{first},{rest}", f"{first}{rest}", True
    yield rf"{first}\,{rest}", f"{first}{{,}}{rest}", True
    yield rf"(1,{rest}, {first})", f"({1000 + rest}, {first})", True
    yield f"{first}.{rest}", f"{first}{rest}", False
    yield f"{first} {rest}", f"{first}{rest}", False


def _texts(random_: random.Random) -> Found:
    number, other = random_.sample(range(3, 99), 2)
    for text in random_.sample(AROUND, 4):
        yield text.format(number, other), str(number), False
        yield text.format(number, other), str(other), False
    for text in random_.sample(BESIDE, 4):
        yield text.format(number), str(number), False
        yield str(number), text.format(number), False
    yield f" ${number}$. ", f"{number}.0", True
    yield "Tuesday", r"\text{tuesday}", True
    yield "Tuesday", "Thursday", False
