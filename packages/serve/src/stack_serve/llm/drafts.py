"""Drafts of the next tokens of a sequence, copied from its own prompt and output, and the acceptance of drafts."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from stack_serve.llm.config import SpeculationConfig

__all__ = ["Acceptance", "Drafts", "find_continuation"]

# An observation loses half of its weight after 3 more.
_KEPT = 0.8
_HIGHEST_RATE = 0.97
# Makes the first drafts of a sequence worthwhile.
_FIRST_RATE = 0.5


def find_continuation(
    tokens: Int32[np.ndarray, " tokens"], *, min_match: int, max_match: int, count: int
) -> tuple[int, ...]:
    """Returns the tokens that followed the latest earlier occurrence of the last tokens.

    Among the earlier occurrences with the longest match of up to `max_match` tokens, the latest is used. If fewer than
    `count` tokens follow it, the text is assumed to be periodic.

    Source: Saxena, Prompt Lookup Decoding, 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).

    Args:
      tokens: prompt and output.
      min_match: minimum number of last tokens that must match; without such a match, the result is empty.
      max_match: maximum number of last tokens that are compared.
      count: number of tokens to return.
    """
    if len(tokens) <= min_match:
        return ()
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = min(len(ends), 1)
    while matched and matched < max_match:
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return tuple(np.resize(tokens[ends[-1] + 1 :], count).tolist()) if matched >= min_match else ()


class Acceptance:
    """Estimate of the fraction of drafted tokens that is accepted.

    Args:
      rate: initial estimate, which three rejected drafts revoke.
    """

    def __init__(self, rate: float) -> None:
        self.restore(rate)

    def restore(self, rate: float) -> None:
        """Replaces all observations by an initial estimate."""
        self._accepted, self._tried = 2 * rate, 2.0

    @property
    def rate(self) -> float:
        """Probability that a drafted token is accepted if the previous ones are."""
        return min(self._accepted / self._tried, _HIGHEST_RATE)

    def expected_tokens(self, drafted: int) -> float:
        """Returns the expected number of accepted tokens of a draft: the sum of rate**i for i = 1 to `drafted`."""
        return self.rate * (1 - self.rate**drafted) / (1 - self.rate)

    def observe(self, accepted: int, *, is_rejected: bool) -> None:
        """Records the number of accepted tokens of a draft, and whether a token was rejected after them."""
        self._accepted = _KEPT * self._accepted + accepted
        self._tried = _KEPT * self._tried + accepted + is_rejected


class Drafts(Acceptance):
    """Drafter of one sequence by prompt lookup, with an estimate of the fraction of its tokens that is accepted.

    While the sequence is not speculated, its drafts are still compared with the tokens that it generates. This costs a
    lookup per step on the host, and nothing on the devices.

    Args:
      config: settings of the drafts.
      tokens: tokens of the prompt.
      max_tokens: maximum total length of the prompt and its continuation.
    """

    def __init__(self, config: SpeculationConfig, tokens: Sequence[int], max_tokens: int) -> None:
        super().__init__(_FIRST_RATE)
        self._config = config
        self._tokens = np.empty(max_tokens, np.int32)
        self._count = len(tokens)
        self._tokens[: self._count] = tokens
        self._expected: tuple[int, ...] | None = None
        self._matched = 0

    def draft(self) -> tuple[int, ...]:
        """Returns a draft of the next tokens; empty if the text does not repeat itself."""
        if self._expected is None or self._matched:
            self._expected, self._matched = self._find(), 0
            if not self._expected:
                self.observe(0, is_rejected=True)
        return self._expected

    def extend(self, tokens: Sequence[int], *, drafted: int = 0) -> None:
        """Appends the generated tokens of a step.

        Args:
          tokens: generated tokens. If the step verified a draft, all but the last one are accepted.
          drafted: number of tokens of the draft that the step verified. With 0, the tokens are compared with the draft
            that they would have had.
        """
        if drafted:
            self._settle(len(tokens) - 1, is_rejected=len(tokens) <= drafted)
        for token in () if drafted else tokens:
            if not self._expected:
                break
            if token != self._expected[self._matched]:
                self._settle(self._matched, is_rejected=True)
                break
            self._matched += 1
            if self._matched == len(self._expected):
                self._settle(self._matched, is_rejected=False)
        self._tokens[self._count : self._count + len(tokens)] = tokens
        self._count += len(tokens)
        if not (drafted or self._expected):
            self._expected = None
            self.draft()

    def _find(self) -> tuple[int, ...]:
        config = self._config
        known = self._tokens[: self._count]
        return find_continuation(known, min_match=config.min_match, max_match=config.max_match, count=config.tokens)

    def _settle(self, accepted: int, *, is_rejected: bool) -> None:
        self.observe(accepted, is_rejected=is_rejected)
        self._expected, self._matched = None, 0
