r"""Exact arithmetic of expressions, in which two expressions are equal only if their values are.

An expression is a quotient of two sums. A sum maps each monomial to its rational coefficient, and a monomial maps atoms
to their exponents:

    (2x + \sqrt{8}) / (y - 1) = ({x: 2, 2^(1/2): 2}, {y: 1, 1: -1})

Atoms are variables, pi, e, i, primes with an exponent between 0 and 1, and opaque atoms such as sin(x), which are
compared as text only. Without opaque atoms, equality is decidable: roots of products of distinct primes are linearly
independent over the rationals (Besicovitch, 1940), and cross multiplication compares quotients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias

__all__ = ["Expression", "Unreadable", "number", "opaque", "symbol"]

Monomial: TypeAlias = tuple[tuple[str, Fraction], ...]
Sum: TypeAlias = Mapping[Monomial, Fraction]

# Far above the size of real answers; larger expressions are rejected before they become expensive.
_MAX_TERMS: Final = 256
_MAX_BITS: Final = 4096
_MAX_EXPONENT: Final = 64
# Trial division takes at most 10^5 steps.
_MAX_FACTORED: Final = 10**10

_ONE: Final[Monomial] = ()
_POSITIVE: Final = {"pi": math.pi, "e": math.e}
"""Positive constants and their values. Their roots may be taken within a monomial."""


class Unreadable(Exception):  # a result that callers convert to None, rather than an error
    """Raised if the text is not an expression, or if the expression is too large or undefined."""


@dataclass(frozen=True)
class Expression:
    """A quotient of sums; `bottom` is 1 if the divisor was a monomial."""

    top: Sum
    bottom: Sum

    def __add__(self, other: "Expression") -> "Expression":
        if self.bottom == other.bottom:
            return Expression(_added(self.top, other.top), self.bottom)
        tops = _multiplied(self.top, other.bottom), _multiplied(other.top, self.bottom)
        return Expression(_added(*tops), _multiplied(self.bottom, other.bottom))

    def __neg__(self) -> "Expression":
        return Expression({each: -value for each, value in self.top.items()}, self.bottom)

    def __sub__(self, other: "Expression") -> "Expression":
        return self + -other

    def __mul__(self, other: "Expression") -> "Expression":
        return Expression(_multiplied(self.top, other.top), _multiplied(self.bottom, other.bottom))

    def __truediv__(self, other: "Expression") -> "Expression":
        return self * other.inverse()

    def inverse(self) -> "Expression":
        if not self.top:
            raise Unreadable("a division by zero")
        if len(self.top) == 1:  # a monomial divisor moves to the top, which makes 1/sqrt(2) equal sqrt(2)/2
            ((monomial, value),) = self.top.items()
            inverse = _monomial({atom: -exponent for atom, exponent in monomial}, 1 / value)
            return Expression(_multiplied(self.bottom, inverse), {_ONE: Fraction(1)})
        return Expression(self.bottom, self.top)

    def power(self, exponent: "Expression") -> "Expression":
        found = exponent.rational
        if found is None:
            return opaque("power", self, exponent)
        if found.denominator > 1:
            return self.root(found.denominator).power(number(found.numerator))
        base, times = self if found > 0 else self.inverse(), abs(found.numerator)
        if (value := base.rational) is not None:
            # Checked before the power is computed, which could be huge.
            if times * max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
                raise Unreadable(f"an exponent of {found}")
            return number(value**times)
        if times > _MAX_EXPONENT:
            raise Unreadable(f"an exponent of {found}")
        result = number(1)
        for _ in range(times):
            result *= base
        return result

    def root(self, degree: int) -> "Expression":
        """Returns the principal root; for a negative number and an odd degree, the real root."""
        if not 1 < degree <= _MAX_EXPONENT:
            raise Unreadable(f"a root of degree {degree}")
        is_monomial = len(self.top) == 1 and self.bottom == {_ONE: 1}
        ((monomial, value), *_) = self.top.items() if is_monomial else [(_ONE, Fraction(0))]
        if not self.top:
            return self
        # Even roots of negative numbers are exact only for square roots of numbers, as multiples of i.
        if not is_monomial or (value < 0 and degree % 2 == 0 and (degree > 2 or monomial)):
            return opaque(f"root {degree}", self)
        # A root is distributed over positive atoms only, because sqrt(x^2) is |x| rather than x.
        positive = {atom: exponent for atom, exponent in monomial if atom in _POSITIVE or atom.isdigit()}
        others = tuple((atom, exponent) for atom, exponent in monomial if atom not in positive)
        roots = {atom: exponent / degree for atom, exponent in positive.items()}
        for base, sign in ((abs(value).numerator, 1), (value.denominator, -1)):
            for prime, count in _factors(base).items():
                roots[str(prime)] = roots.get(str(prime), Fraction(0)) + Fraction(sign * count, degree)
        found = Expression(_monomial(roots, Fraction(1)), {_ONE: Fraction(1)})
        if value < 0:
            found = symbol("i") * found if degree == 2 else -found
        rest = Expression({others: Fraction(1)}, {_ONE: Fraction(1)})
        return found * opaque(f"root {degree}", rest) if others else found

    @property
    def rational(self) -> Fraction | None:
        """The value if it is rational, else None."""
        if self.bottom != {_ONE: 1} or self.top.keys() - {_ONE}:
            return None
        return self.top.get(_ONE, Fraction(0))

    @property
    def constant(self) -> Fraction | None:
        """The value if it is rational after cancellation, else None."""
        if not self.top or self.top.keys() != self.bottom.keys():
            return Fraction(0) if not self.top else None
        ratios = {value / self.bottom[monomial] for monomial, value in self.top.items()}
        return ratios.pop() if len(ratios) == 1 else None

    @property
    def is_opaque(self) -> bool:
        # Only the names of opaque atoms contain arguments, and thereby a bracket.
        return any("(" in atom for part in (self.top, self.bottom) for monomial in part for atom, _ in monomial)

    def equals(self, other: "Expression") -> bool | None:
        """Compares two values; returns None if opaque atoms leave the comparison undecided."""
        difference = _added(
            _multiplied(self.top, other.bottom),
            {each: -value for each, value in _multiplied(other.top, self.bottom).items()},
        )
        if not difference:
            return True
        return None if self.is_opaque or other.is_opaque else False

    def approximation(self) -> float | None:
        """Returns the float value of a real constant; None for other expressions."""
        try:
            top, bottom = (
                sum(float(value) * math.prod(_value(*power) for power in monomial) for monomial, value in part.items())
                for part in (self.top, self.bottom)
            )
            return top / bottom
        # KeyError: a variable, i or an opaque atom, which lack a value.
        except (KeyError, OverflowError, ZeroDivisionError):
            return None

    def __str__(self) -> str:
        return " / ".join(_written(part) for part in (self.top, self.bottom))


def number(value: int | Fraction) -> Expression:
    """Creates a constant."""
    return Expression({_ONE: Fraction(value)} if value else {}, {_ONE: Fraction(1)})


def symbol(name: str) -> Expression:
    """Creates a variable or constant: `i` is the imaginary unit, `pi` and `e` have their usual values."""
    return Expression({((name, Fraction(1)),): Fraction(1)}, {_ONE: Fraction(1)})


def opaque(name: str, *arguments: Expression) -> Expression:
    """Creates the value of an unknown function, which is equal for equal arguments."""
    return symbol(f"{name}({', '.join(map(str, arguments))})")


def _value(atom: str, exponent: Fraction) -> float:
    base = float(atom) if atom.isdigit() else _POSITIVE[atom]
    return base ** float(exponent)


def _written(part: Sum) -> str:
    # Sorted, because the text names an opaque atom: equal arguments must have equal texts.
    return "[" + " + ".join(f"{value} {dict(each)}" for each, value in sorted(part.items())) + "]"


def _added(left: Sum, right: Sum) -> Sum:
    found = dict(left)
    for monomial, value in right.items():
        found[monomial] = found.get(monomial, Fraction(0)) + value
    return _checked({monomial: value for monomial, value in found.items() if value})


def _multiplied(left: Sum, right: Sum) -> Sum:
    # Checked before multiplying, when equal monomials are not merged yet.
    if len(left) * len(right) > 16 * _MAX_TERMS:
        raise Unreadable("too many terms")
    found = dict[Monomial, Fraction]()
    for monomial, value in left.items():
        for other, factor in right.items():
            exponents = dict(monomial)
            for atom, exponent in other:
                exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
            ((product, coefficient),) = _monomial(exponents, value * factor).items()
            found[product] = found.get(product, Fraction(0)) + coefficient
    return _checked({monomial: value for monomial, value in found.items() if value})


def _monomial(exponents: Mapping[str, Fraction], value: Fraction) -> Sum:
    """Multiplies a monomial by a nonzero number, and moves integer powers of primes and of i^2 into the number."""
    rest = dict[str, Fraction]()
    for atom, exponent in exponents.items():
        left = exponent
        if abs(exponent) > _MAX_EXPONENT:
            raise Unreadable(f"an exponent of {exponent}")
        if atom == "i":
            # i^2 = -1 and i^4 = 1, so an exponent below 2 and a sign remain.
            left = exponent % 2
            value = -value if (exponent - left) % 4 else value
        elif atom.isdigit():
            # 2^(5/2) = 4 * 2^(1/2), and 2^(-1/2) = 1/2 * 2^(1/2).
            left = exponent % 1
            value *= Fraction(int(atom)) ** int(exponent - left)
        if left:
            rest[atom] = left
    return {tuple(sorted(rest.items())): value}


def _checked(part: Sum) -> Sum:
    sizes = [max(value.numerator.bit_length(), value.denominator.bit_length()) for value in part.values()]
    if len(part) > _MAX_TERMS or max(sizes, default=0) > _MAX_BITS:
        raise Unreadable("an expression that is too large")
    return part


def _factors(value: int) -> dict[int, int]:
    """Returns the prime factors of a positive number with their counts."""
    if value > _MAX_FACTORED:
        raise Unreadable(f"a root of {value}")
    found, prime = dict[int, int](), 2
    while prime * prime <= value:
        while value % prime == 0:
            found[prime], value = found.get(prime, 0) + 1, value // prime
        prime += 1
    return found | ({value: found.get(value, 0) + 1} if value > 1 else {})
