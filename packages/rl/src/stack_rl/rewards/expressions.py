"""Recursive-descent parser of expressions in LaTeX or plain notation, with the usual precedence."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from stack_rl.rewards.algebra import Expression, Unreadable, number, opaque, symbol

__all__ = ["FUNCTIONS", "GREEK", "Token", "is_infinite", "plain", "read_expression", "tokenize"]


class Token(NamedTuple):
    r"""A token of a mathematical text.

    Attributes:
      kind: "number", "word", "upright" for a word in \text{}, "command" or "symbol".
      text: characters of the token.
      is_spaced: True if a space precedes the token.
    """

    kind: str
    text: str
    is_spaced: bool


# 100! has 525 bits, well within the bounds of the algebra.
_MAX_FACTORIAL: Final = 100

# Applied in this order: `\,` between groups of digits becomes a comma before other spaces are removed. `(?![a-zA-Z])`
# ends the name of a command, so `\in` does not match the beginning of `\infty`.
_LAYOUT: Final = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))", ","),
        (r"\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\!", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\*\*", "^"),
        (r"\\(?:cdot|times)(?![a-zA-Z])|[\N{MULTIPLICATION SIGN}·]", "*"),
        (r"\\div(?![a-zA-Z])|÷", "/"),
        (r"\\pi(?![a-zA-Z])|π", r"\\pi "),
        (r"\\infty(?![a-zA-Z])|∞|\binf(?:inity)?\b|\boo\b", r"\\infty "),
        (r"\\(?:in)(?![a-zA-Z])|∈", "∈"),
        # `U` is a union only between brackets; elsewhere it is a variable.
        (r"\\cup(?![a-zA-Z])|(?<=[)\]}])\s*U\s*(?=[(\[{])", "\N{UNION}"),
        (r"\\(?:leq?|leqslant)(?![a-zA-Z])|<=", "≤"),
        (r"\\(?:geq?|geqslant)(?![a-zA-Z])|>=", "≥"),
        (r"\\neq?(?![a-zA-Z])|!=", "≠"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\pm(?![a-zA-Z])|\+/-", "±"),
        (r"\\mp(?![a-zA-Z])", "∓"),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])|∅", "{}"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", "°"),
        (r"\\(?=[{}%$])", ""),
        ("\N{MINUS SIGN}", "-"),
        ("√", r"\\sqrt "),
        ("²", "^2"),
        ("³", "^3"),
        (r"\s+", " "),
    )
]
# \text{} is the first alternative, because `\text` is a command for the later one.
_TOKEN: Final = re.compile(
    r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{(?P<upright>[^{}]*)\}|(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[A-Za-z]+)|\\(?P<command>[A-Za-z]+)|(?P<symbol>\S)"
)
GREEK: Final = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
))  # fmt: skip
_APPLIED: Final = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp",
))  # fmt: skip
# `_Reader._function` rejects names outside `_APPLIED`; without them, `lg` would be the product of l and g.
FUNCTIONS: Final = _APPLIED | {"sqrt", "lg", "arg", "gcd", "lcm", "max", "min", "mod"}


def plain(text: str) -> str:
    """Removes LaTeX that only affects the layout, and collapses runs of spaces."""
    found = text.strip().removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if found.startswith(opening) and found.endswith(closing) and len(found) > len(opening + closing):
            found = found[len(opening) : len(found) - len(closing)]
            break
    for pattern, new in _LAYOUT:
        found = pattern.sub(new, found)
    # The final period may be outside the delimiters, as in `$4$.`, or inside them, as in `$4.$`.
    return found.strip().removesuffix(".").strip()


def tokenize(text: str, kind: str = "word") -> Iterator[Token]:
    r"""Yields the tokens of a text returned by `plain`; letters outside \text{} have this `kind`."""
    end = 0
    for found in _TOKEN.finditer(text):
        is_spaced, end = found.start() > end, found.end()
        if found["upright"] is not None:
            yield from tokenize(f" {found['upright']}", "upright")
            continue
        name = str(found.lastgroup)
        yield Token(kind if name == "word" else name, found[name], is_spaced)


def read_expression(tokens: Sequence[Token]) -> Expression:
    """Parses all tokens as one expression.

    Raises:
      Unreadable: the tokens do not form an expression, or an ambiguous one.
    """
    reader = _Reader(tokens)
    found = reader.sum()
    if not reader.is_at_end:
        raise Unreadable(f"the rest from {reader.peek!r}")
    # The tokens are asked, since arithmetic on a symbol has already cancelled it in infinity - infinity.
    if any(token.text.lstrip("\\") == "infty" for token in tokens) and not is_infinite(found):
        raise Unreadable("arithmetic with infinity")
    return found


def is_infinite(value: Expression) -> bool:
    """Returns whether an expression is plus or minus infinity."""
    infinity = symbol("infinity")
    return value in (infinity, -infinity)


class _Reader:
    """A recursive-descent parser with the usual precedence."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens, self._at = list(tokens), 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._tokens)

    @property
    def peek(self) -> Token:
        """The next token; an empty symbol at the end."""
        return Token("symbol", "", False) if self.is_at_end else self._tokens[self._at]

    def take(self, *texts: str) -> str:
        """Consumes and returns the next symbol if `texts` contains it, otherwise returns an empty string."""
        found = self.peek
        if found.kind != "symbol" or found.text not in texts:
            return ""
        self._at += 1
        return found.text

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"{self.peek.text!r} instead of {text!r}")

    def sum(self) -> Expression:
        total = self._signed(self.term)
        while self.peek.kind == "symbol" and self.peek.text in ("+", "-"):
            total += self._signed(self.term)
        return total

    def _signed(self, read_part: Callable[[], Expression]) -> Expression:
        is_negative = False
        while sign := self.take("+", "-"):
            is_negative ^= sign == "-"
        found = read_part()
        return -found if is_negative else found

    def term(self) -> Expression:
        # A mixed number counts as a quotient, because `1 1/2 x` is as ambiguous as `1/2 x`.
        mixed = self._mixed_number()
        found, has_divided = (self.factor(), False) if mixed is None else (mixed, True)
        while True:
            if operator := self.take("*", "/"):
                other = self._signed(self.factor)
                found, has_divided = (found * other, has_divided) if operator == "*" else (found / other, True)
            elif self._begins_factor():
                if has_divided or self.peek.kind == "number":  # 1/2x and 5 6 are ambiguous
                    raise Unreadable("an implicit product after a quotient or before a number")
                found *= self.factor()
            else:
                return found

    def _begins_factor(self) -> bool:
        token = self.peek
        return token.kind in ("number", "word", "upright", "command") or token.text == "("

    def _mixed_number(self) -> Expression | None:
        """Parses a mixed number such as `1 1/2`."""
        tokens = self._tokens[self._at : self._at + 4]
        kinds = [token.kind for token in tokens]
        if kinds != ["number", "number", "symbol", "number"] or tokens[2].text != "/" or not tokens[1].is_spaced:
            return None
        if not all(tokens[at].text.isdigit() for at in (0, 1, 3)):
            raise Unreadable("two adjacent numbers")
        self._at += 4
        if self.peek.text == "/":
            raise Unreadable("a mixed number that is divided")
        return _mixed(_decimal(tokens[0].text), _ratio(_decimal(tokens[1].text), _decimal(tokens[3].text)))

    def factor(self) -> Expression:
        found = self.primary()
        while self.take("!"):
            value = found.rational
            if value is None or value.denominator > 1 or not 0 <= value <= _MAX_FACTORIAL:
                raise Unreadable("a factorial of anything but a small whole number")
            found = number(math.factorial(int(value)))
        if self.take("^"):
            found = found.power(self._exponent())
            if self.peek.text in ("^", "!"):
                raise Unreadable("a power of a power without brackets")
        return found

    def _exponent(self) -> Expression:
        if self.take("{"):
            return self._closed("}")
        if self.take("("):
            return self._closed(")")
        if self.peek.kind == "word" and len(self.peek.text) > 1:
            raise Unreadable("an exponent of several letters without brackets")
        return self._signed(self.primary)

    def _closed(self, closing: str) -> Expression:
        found = self.sum()
        self.expect(closing)
        return found

    def primary(self) -> Expression:
        if self.take("("):
            return self._closed(")")
        token = self.peek
        self._at += not self.is_at_end
        match token.kind:
            case "number":
                return self._number(token.text)
            case "word" | "upright":
                return self._word(token)
            case "command":
                return self._command(token.text)
        raise Unreadable(f"{token.text!r}")

    def _number(self, text: str) -> Expression:
        value = _decimal(text)
        if self.peek.text == "_":
            if not text.isdigit():
                raise Unreadable("an index of a number that is not an integer")
            return self._variable(text, longest=2)  # a numeral in a base differs from its value as an answer
        # `1\frac{1}{2}` is a mixed number, but `2\frac{x}{y}` a product.
        if self.peek != Token("command", "frac", self.peek.is_spaced) or not text.isdigit():
            return number(value)
        self._at += 1
        fraction = self._fraction()
        part = fraction.rational
        return number(value) * fraction if part is None else _mixed(value, part)

    def _word(self, token: Token) -> Expression:
        name = token.text
        if name == "pi":
            return symbol("pi")
        if name == "sqrt":
            self.expect("(")
            return self._closed(")").root(2)
        if name in FUNCTIONS:
            return self._function(name)
        # Up to three letters are a product of variables; in \text{}, only a single letter is a variable.
        if len(name) > (3 if token.kind == "word" else 1):
            raise Unreadable(f"the word {name!r}")
        found = number(1)
        for letter in name[:-1]:
            found *= symbol(letter)
        if name[-1] in "fgh" and self.peek.text == "(":
            raise Unreadable("an unknown function")
        return found * self._variable(name[-1])

    def _variable(self, name: str, *, longest: int = 1) -> Expression:
        """Parses a variable with its index; an index without braces has one letter or digit."""
        if not self.take("_"):
            return symbol(name)
        is_braced = bool(self.take("{"))
        token = self.peek
        if token.kind not in ("number", "word", "upright") or "." in token.text:
            raise Unreadable("an index that is neither a number nor a word")
        self._at += 1
        if is_braced:
            self.expect("}")
        elif len(token.text) > longest:
            raise Unreadable("an index of several letters without brackets")
        return symbol(f"{name}_{token.text}")

    def _command(self, name: str) -> Expression:
        if name in _APPLIED:
            return self._function(name)
        if name in GREEK:
            return self._variable(name)
        match name:
            case "frac":
                return self._fraction()
            case "sqrt":
                return self._root()
            case "binom":
                return self._binomial()
            case "pi" | "infty":
                return symbol({"pi": "pi", "infty": "infinity"}[name])
        raise Unreadable(f"\\{name}")

    def _root(self) -> Expression:
        degree = number(2)
        if self.take("["):
            degree = self._closed("]")
        value = degree.rational
        if value is None or value.denominator > 1 or value < 2:
            raise Unreadable("a root whose degree is not an integer above 1")
        return self._argument().root(int(value))

    def _binomial(self) -> Expression:
        above, below = self._argument().rational, self._argument().rational
        if above is None or below is None or (above.denominator, below.denominator) != (1, 1):
            raise Unreadable("a binomial coefficient of numbers that are not integers")
        if not 0 <= below <= above <= _MAX_FACTORIAL:
            raise Unreadable("a binomial coefficient out of bounds")
        return number(math.comb(int(above), int(below)))

    def _fraction(self) -> Expression:
        above = self._argument()
        return above / self._argument()

    def _argument(self) -> Expression:
        """Parses the argument of a command: a group, or one digit, letter or command, as in TeX."""
        if self.take("{"):
            return self._closed("}")
        token = self.peek
        if token.kind == "symbol" and token.text == "(":
            return self.primary()
        # `\frac12` has the arguments 1 and 2, so the rest of the token is put back.
        if token.kind in ("number", "word") and len(token.text) > 1:
            self._tokens[self._at] = token._replace(text=token.text[0])
            self._tokens.insert(self._at + 1, Token(token.kind, token.text[1:], False))
        elif self.is_at_end or token.kind == "symbol":
            raise Unreadable("a command without its argument")
        return self.primary()

    def _function(self, name: str) -> Expression:
        """Parses a function with its argument; without brackets, the argument is a number, a letter or both (`2x`)."""
        if name not in _APPLIED:
            raise Unreadable(f"the function {name}")
        power, base = number(1), list[Expression]()
        if self.take("^"):
            power = self._exponent()
            # `\sin^{-1} x` is the arcsine, not a power of the sine.
            if (value := power.rational) is None or value <= 0:
                raise Unreadable("an inverse function")
        if self.take("_"):
            base = [self._argument()]
        if opening := self.take("(", "{"):
            argument = self._closed({"(": ")", "{": "}"}[opening])
        else:
            argument = self._bare_argument()
        found = symbol("e").power(argument) if name == "exp" else opaque(name, *base, argument)
        return found.power(power)

    def _bare_argument(self) -> Expression:
        token = self.peek
        found = number(1)
        if token.kind == "number":
            self._at += 1
            found = number(_decimal(token.text))
            if self.peek.is_spaced or self.peek.kind not in ("word", "command"):
                return self._checked_end(found)
        token = self.peek
        is_letter = token.kind == "word" and len(token.text) == 1
        if not is_letter and not (token.kind == "command" and token.text in (*GREEK, "pi")):
            raise Unreadable("a function without brackets around its argument")
        return self._checked_end(found * self.primary())

    def _checked_end(self, argument: Expression) -> Expression:
        follows = self.peek
        is_function = follows.text in _APPLIED
        if (self._begins_factor() and not is_function) or follows.text in ("^", "!"):
            raise Unreadable("an argument without brackets whose end is ambiguous")
        return argument


def _mixed(integer: Fraction, part: Fraction) -> Expression:
    if not 0 < part < 1:
        raise Unreadable("a mixed number whose fraction is not between 0 and 1")
    return number(integer + part)


def _ratio(above: Fraction, below: Fraction) -> Fraction:
    if not below:
        raise Unreadable("a division by zero")
    return above / below


def _decimal(text: str) -> Fraction:
    digits, _, exponent = text.lower().partition("e")
    # Bounded before `Fraction` computes the value: 1e999999999 would have a billion digits.
    if len(digits) > 64 or len(exponent) > 3 or abs(int(exponent or 0)) > 64:
        raise Unreadable("a number that is too long")
    if re.match(r"0\d", digits):
        raise Unreadable("a number that begins with 0")
    return Fraction(text)
