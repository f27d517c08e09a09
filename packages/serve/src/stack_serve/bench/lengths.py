"""Distributions of prompt and answer lengths."""

import math
import random
from dataclasses import dataclass

from stack_core.abi.errors import BenchmarkError

__all__ = ["Lengths"]

_MAX_TOKENS, _MAX_SIGMA = 10**7, 10.0
_FORMS = 'Write a number, "LOW:HIGH" for a uniform distribution, or "lognormal:MEDIAN,SIGMA".'


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1.

    Attributes:
      kind: "uniform" or "lognormal".
      first: smallest length (uniform) or median length (lognormal).
      second: largest length, included (uniform), or standard deviation of the logarithm of the length (lognormal).
    """

    kind: str
    first: float
    second: float

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses "128", "64:512" or "lognormal:128,0.5".

        Raises:
          BenchmarkError: the text has another form, or a length is out of range.
        """
        name, separator, rest = text.partition(":")
        try:
            if name == "lognormal":
                median, sigma = map(float, rest.split(","))
                found = cls("lognormal", median, sigma)
            else:
                low = float(int(name))
                found = cls("uniform", low, float(int(rest)) if separator else low)
        except ValueError as error:
            raise BenchmarkError(f"{text!r} is not a distribution of lengths. {_FORMS}") from error
        in_order = found.second >= (found.first if found.kind == "uniform" else 0)
        largest = _MAX_TOKENS if found.kind == "uniform" else _MAX_SIGMA
        if not (1 <= found.first <= _MAX_TOKENS and in_order and found.second <= largest):
            raise BenchmarkError(f"{text!r} is not a distribution of lengths from 1 to {_MAX_TOKENS} tokens. {_FORMS}")
        return found

    def __str__(self) -> str:
        if self.kind == "lognormal":
            return f"lognormal:{self.first:g},{self.second:g}"
        return f"{self.first:g}" if self.first == self.second else f"{self.first:g}:{self.second:g}"

    def draw(self, source: random.Random) -> int:
        """Samples a length in tokens."""
        if self.kind == "uniform":
            return source.randint(int(self.first), int(self.second))
        return min(max(1, round(source.lognormvariate(math.log(self.first), self.second))), _MAX_TOKENS)
