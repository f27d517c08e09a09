"""Decision when speculation pays, from the measured duration of steps and the acceptance of drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stack_serve.llm.buckets import Buckets
from stack_serve.llm.drafts import Acceptance
from stack_serve.llm.proposer import ModelDrafts

__all__ = ["Speculation"]

# Assumed duration of a verification, relative to a decoding step, until both are measured.
_ASSUMED_COST = 1.25
# A verification computes more than a decoding step. A smaller quotient means that the load of the machine changed
# between the two measurements, and would let speculation go on without any accepted draft.
_LEAST_COST = 1.05
# Speculation must be this much faster to begin, so that noise does not switch it on and off.
_LEAST_GAIN = 1.15
_NEW_WEIGHT = 0.2
# A slow moment of the machine must not disable a size, or decoding, forever.
_MOST_UNUSED_STEPS = 256
# Steps with constraints are never planned ahead, so decoding is only bounded. This many bounds suffice.
_ENOUGH_BOUNDS = 4
# While a proposer does not run, its acceptance is unknown. It is tried again after so many turns, and less and less
# often until it is worthwhile for as many.
_RETRY_TURNS, _MOST_RETRY_TURNS = 64, 4096


@dataclass
class _Duration:
    """Moving average of the duration of a program.

    Attributes:
      mean_s: average; None until measured or bounded. The first run is not measured, because it touches new memory.
      runs: number of runs.
      bounds: number of upper bounds.
      unused: number of other steps since the last run or bound.
    """

    mean_s: float | None = None
    runs: int = 0
    bounds: int = 0
    unused: int = 0

    @property
    def is_known(self) -> bool:
        """True if the average can be relied on."""
        return self.runs > 1 or self.bounds >= _ENOUGH_BOUNDS

    def add(self, took_s: float) -> None:
        self.runs += 1
        self.unused = 0
        if self.runs > 1:
            # The first measurement replaces a bound.
            old_s = took_s if self.runs == 2 or self.mean_s is None else self.mean_s
            # One interrupted step counts as at most twice the average.
            self.mean_s = old_s + _NEW_WEIGHT * (min(took_s, 2 * old_s) - old_s)

    def bound(self, max_s: float) -> None:
        """Lowers the average to an upper bound, which stands for it until a run is measured."""
        self.bounds += 1
        self.unused = 0
        self.mean_s = max_s if self.mean_s is None else min(self.mean_s, max_s)

    def age(self) -> None:
        """Counts a step of another kind; after too many of them, the duration is unknown again."""
        self.unused += 1
        if self.unused == _MOST_UNUSED_STEPS:
            self.mean_s = None
            self.runs = self.bounds = 0


@dataclass
class Speculation:
    """Chooses the drafts of each step so that the expected number of tokens per second is the highest.

        (R + sum of E[accepted_r]) / (R (t_verify(T) + (L + 1) t_draft(R)) / t_decode(R)) > 1

    R is the number of rows, T the token bucket of the verification, L the number of tokens that a proposer drafts,
    and t a measured duration per step, which includes the host's; t_draft is 0 without a proposer. Without drafts,
    the engine plans a step while the previous one runs. Drafts continue the newest tokens, so a step with drafts is
    planned after the previous one is read. The durations of verifications contain that delay.

    Attributes:
      buckets: shapes of the engine's programs.
      tokens: maximum number of drafted tokens per row.
      draft_cost: assumed t_draft / t_decode until both are measured; None without a proposer.
      is_on: True if the last decision was to speculate.
    """

    buckets: Buckets
    tokens: int
    draft_cost: float | None = None
    is_on: bool = True
    _turns: int = 0
    _retry_turns: int = _RETRY_TURNS
    _decoding: dict[int, _Duration] = field(default_factory=dict)
    _drafting: dict[int, _Duration] = field(default_factory=dict)
    _verification: dict[int, _Duration] = field(default_factory=dict)
    _filling: _Duration = field(default_factory=_Duration)

    def pays(self, rows: Sequence[Acceptance], available: Sequence[int] | None = None) -> bool:
        """Returns whether drafts are expected to pay, before the newest tokens of the rows are known.

        Not before decoding is measured: the first steps of an engine, and a few after many verifications, only decode.

        Args:
          rows: decoding rows.
          available: maximum number of drafted tokens of each row; None means `tokens`.
        """
        if not self._decoding.get(self.buckets.of_decoding(len(rows)), _Duration()).is_known:
            return False
        _, gain = self._best(rows, [self.tokens] * len(rows) if available is None else available)
        was_on, self.is_on = self.is_on, gain > (1.0 if self.is_on else _LEAST_GAIN)
        self._turns = self._turns + 1 if was_on == self.is_on else 0
        if self.is_on and self._turns == _RETRY_TURNS:
            self._retry_turns = _RETRY_TURNS
        elif not self.is_on and self._turns >= self._retry_turns:
            self._turns, self._retry_turns = 0, min(2 * self._retry_turns, _MOST_RETRY_TURNS)
            for row in rows:
                if isinstance(row, ModelDrafts):
                    row.retry()
        return self.is_on

    def choose(self, rows: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        """Returns the number of tokens to verify of each draft.

        Args:
          rows: decoding rows.
          available: number of drafted tokens of each row.
        """
        lengths, gain = self._best(rows, available)
        return lengths if gain > 1.0 else [0] * len(rows)

    def record_decoding(self, rows: int, took_s: float, *, is_ahead: bool) -> None:
        """Records the duration of a decoding step.

        A step that was not planned ahead takes longer than others, so its duration is an upper bound. Without this
        bound, one slow step can make decoding seem so expensive that speculation never ends, and no step is planned
        ahead again.
        """
        decoding = self._decoding.setdefault(self.buckets.of_decoding(rows), _Duration())
        if not is_ahead:
            decoding.bound(took_s)
            return
        decoding.add(took_s)
        for duration in (*self._verification.values(), *self._drafting.values()):
            duration.age()

    def record_verification(self, tokens: int, took_s: float) -> None:
        """Records the duration of a verification, from the end of the previous step."""
        self._verification.setdefault(self.buckets.of_verification(tokens), _Duration()).add(took_s)
        for duration in self._decoding.values():
            duration.age()

    def record_drafting(self, rows: int, steps: int, took_s: float) -> None:
        """Records the duration of `steps` steps of a draft model."""
        self._drafting.setdefault(self.buckets.of_decoding(rows), _Duration()).add(took_s / steps)

    def record_filling(self, keys: int, rows: int, steps: int, took_s: float) -> None:
        """Records the duration of `steps` drafting steps after the computation of `keys` missing keys."""
        drafting = self._drafting.get(self.buckets.of_decoding(rows), _Duration()).mean_s
        if drafting is not None:
            self._filling.add(max(took_s - steps * drafting, 0.0) / keys)

    def repaid_keys(self, rows: int, acceptance: Acceptance) -> float:
        """Returns the number of missing keys of a proposer whose computation one more generated token repays.

        Args:
          rows: number of decoding rows.
          acceptance: expected acceptance of each row.
        """
        filling, decoding = self._filling.mean_s, self._decoding.get(self.buckets.of_decoding(rows), _Duration()).mean_s
        if not filling or decoding is None:
            return math.inf
        _, gain = self._best([acceptance] * rows, [self.tokens] * rows)
        return decoding / filling * (1 - 1 / max(gain, 1.0))

    def _best(self, rows: Sequence[Acceptance], available: Sequence[int]) -> tuple[list[int], float]:
        """Returns the best draft lengths of one to all token buckets, and their speed relative to decoding."""
        found, best = [0] * len(rows), 0.0
        # Rows whose drafts are accepted most often get the tokens of a bucket first.
        order = sorted(range(len(rows)), key=lambda row: -rows[row].rate)
        for size in self.buckets.verification:
            room = min(size, self.buckets.max_tokens) - len(rows)
            fits = False
            for limit in self._limits:
                lengths, left = [0] * len(rows), room
                for row in order:
                    lengths[row] = max(min(available[row], limit, left), 0)
                    left -= lengths[row]
                if not any(lengths):
                    break  # no drafts, or too many rows for this bucket
                tokens = len(rows) + sum(map(Acceptance.expected_tokens, rows, lengths))
                cost = self._cost(len(rows), size) + self._drafting_cost(len(rows), max(lengths))
                if (gain := tokens / (len(rows) * cost)) > best:
                    found, best = lengths, gain
                fits |= lengths == list(available)
            if fits:  # a larger bucket would hold the same drafts
                break
        return found, best

    @property
    def _limits(self) -> list[int]:
        """Draft lengths that are compared: a proposer takes time for each token, a lookup does not."""
        return [
            self.tokens >> halvings for halvings in range(1 if self.draft_cost is None else self.tokens.bit_length())
        ]

    def _drafting_cost(self, rows: int, tokens: int) -> float:
        """Returns the duration of drafting relative to a decoding step."""
        if self.draft_cost is None:
            return 0.0
        bucket = self.buckets.of_decoding(rows)
        decoding, drafting = (measured.get(bucket, _Duration()).mean_s for measured in (self._decoding, self._drafting))
        is_known = decoding is not None and drafting is not None
        return (tokens + 1) * (drafting / decoding if is_known else self.draft_cost)

    def _cost(self, rows: int, size: int) -> float:
        """Returns the duration of a verification relative to a decoding step."""
        decoding = self._decoding.get(self.buckets.of_decoding(rows), _Duration()).mean_s
        # Until a size is measured, it is assumed to take as long as the smaller ones.
        measured = [self._verification[each].mean_s for each in sorted(self._verification) if each <= size]
        verification = max((each for each in measured if each is not None), default=None)
        if decoding is None or verification is None:
            return _ASSUMED_COST
        return max(verification / decoding, _LEAST_COST)
