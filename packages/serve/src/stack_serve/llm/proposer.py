"""Proposers: models that draft the next tokens of sequences, with keys under the page numbers of the served model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from stack_serve.llm.config import EngineConfig
from stack_serve.llm.drafts import Acceptance
from stack_serve.llm.programs import Programs
from stack_serve.llm.scheduler_state import Row
from stack_serve.llm.sequence import Sequence as State

__all__ = ["ModelDrafts", "Proposer"]

# At this rate, most pairs of models are worth a trial of three drafts.
_FIRST_RATE = 0.8


class ModelDrafts(Acceptance):
    """Progress of a proposer on one sequence, and the acceptance of its drafts.

    Attributes:
      sequence: sequence of the served model.
      computed_tokens: number of tokens whose keys of the proposer are in the pages of the sequence.

    Args:
      pair: acceptance over all sequences, the initial estimate of this one.
    """

    def __init__(self, sequence: State, pair: Acceptance) -> None:
        super().__init__(pair.rate)
        self.sequence, self.computed_tokens = sequence, 0
        self._pair, self._preemptions = pair, 0

    @property
    def has_all_keys(self) -> bool:
        """True if the proposer can continue the sequence: only the key of the newest token is missing."""
        return self.computed_tokens == self.sequence.computed_tokens

    @property
    def remaining_tokens(self) -> int:
        """Maximum number of tokens that are still to be generated."""
        return self.sequence.max_total_tokens - len(self.sequence.tokens)

    def extend(self, tokens: Sequence[int], *, drafted: int = 0) -> None:
        """Records the generated tokens of a step, which the sequence already has.

        Args:
          tokens: generated tokens. If the step verified a draft, all but the last one are accepted.
          drafted: number of drafted tokens.
        """
        if drafted:
            for each in (self, self._pair):
                each.observe(len(tokens) - 1, is_rejected=len(tokens) <= drafted)
        # Other tokens replaced the rejected drafts, so their keys are computed again.
        self.computed_tokens = min(self.computed_tokens, len(self.sequence.tokens) - 1)

    def retry(self) -> None:
        """Makes drafts worthwhile again, to measure the acceptance."""
        for each in (self, self._pair):
            each.restore(_FIRST_RATE)

    def resume(self, digests: Mapping[int, bytes], page_tokens: int) -> None:
        """Finds the keys of the first pages in the cache if the sequence is new, or has other pages after a preemption.

        Args:
          digests: digests of the pages that are filled with keys of the proposer, by page number.
          page_tokens: number of tokens per page.
        """
        sequence = self.sequence
        if self.computed_tokens and not self._is_preempted:
            return
        self.computed_tokens, self._preemptions = 0, sequence.preemptions
        for page, digest in zip(sequence.pages, sequence.digests, strict=False):
            if digests.get(page) != digest or self.computed_tokens + page_tokens > sequence.computed_tokens:
                break
            self.computed_tokens += page_tokens

    @property
    def _is_preempted(self) -> bool:
        return self._preemptions != self.sequence.preemptions


class Proposer(ABC):
    """Drafts tokens with a model whose keys are in pools of their own, under the page numbers of the served model.

    Each drafted token is sampled like a token of the served model: with the settings of its sequence, and with the
    random numbers of its position, which `Step.verify` uses again. Greedy drafts are therefore the most likely tokens,
    and sampled drafts agree with the served model more often than the most likely tokens would. A draft only changes
    how many tokens a step generates, and never which ones, so any keys are correct; wrong ones lower the acceptance.
    The keys of prompts are computed when a sequence is drafted for the first time. Sequences with images are not
    drafted, because proposers have no features of their images.

    Source: Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024
    (arXiv:2408.07978).

    Attributes:
      pair: acceptance over all sequences.
      cost: estimated duration of a drafting step, relative to a decoding step of the served model.
      served: programs of the served model, whose slots have the tokens; drafts are written there.
      programs: programs that draft; they may be programs of the served model.

    Args:
      served, programs, cost: see Attributes.
      config: settings of the engine.
      max_positions: maximum number of tokens of a sequence that is drafted.
      usual_tokens: number of keys of a sequence that are missing between two drafts.
    """

    def __init__(
        self,
        served: Programs,
        programs: Programs,
        config: EngineConfig,
        *,
        cost: float,
        max_positions: int,
        usual_tokens: int = 0,
    ) -> None:
        self.served, self.programs, self.cost = served, programs, cost
        self.pair = Acceptance(_FIRST_RATE)
        self._step_tokens, self._page_tokens = config.step_tokens, config.page_tokens
        self._max_positions, self._usual_tokens = max_positions, usual_tokens
        self._digests: dict[int, bytes] = {}
        self._weights_version = 0

    @property
    def separate_programs(self) -> list[Programs]:
        """The programs that are not programs of the served model."""
        return [] if self.programs is self.served else [self.programs]

    def room(self, drafts: ModelDrafts) -> int:
        """Returns the maximum number of tokens to draft for a sequence, 0 if its prompt has images."""
        if drafts.sequence.images:
            return 0
        return max(self._max_positions - len(drafts.sequence.tokens), 0)

    def count_missing_keys(self, drafts: ModelDrafts) -> int:
        """Returns the number of keys to compute before a sequence is drafted, 0 if as few are missing as usual."""
        drafts.resume(self._digests, self._page_tokens)
        missing = drafts.sequence.computed_tokens - drafts.computed_tokens
        return missing if missing > self._usual_tokens else 0

    def catch_up(self, tables: np.ndarray, rows: Sequence[ModelDrafts]) -> int:
        """Launches the computation of missing keys, up to `step_tokens` of them.

        Args:
          tables: int32[slots, pages], page numbers of each slot's sequence.
          rows: running sequences.

        Returns:
          Number of these keys; 0 if as few are missing as usual, and the duration of this step is typical.
        """
        missing, room, is_usual = list[tuple[int, ...]](), self._step_tokens, True
        for drafts in rows:
            sequence = drafts.sequence
            drafts.resume(self._digests, self._page_tokens)
            tokens = min(sequence.computed_tokens - drafts.computed_tokens, room)
            if tokens:
                assert sequence.slot is not None
                missing.append((sequence.slot, drafts.computed_tokens, tokens, 0, -1, 0))
                self._add_keys(drafts, tokens)
                room -= tokens
                is_usual &= tokens <= self._usual_tokens
        if missing:
            self._fill(missing, tables[[slot for slot, *_ in missing]])
        return 0 if is_usual else self._step_tokens - room

    def propose(self, tables: np.ndarray, rows: Sequence[tuple[Row, ModelDrafts]]) -> list[tuple[int, ...]]:
        """Drafts the tokens that rows verify after their first token.

        Args:
          tables: int32[rows, pages], page numbers of each row's sequence.
          rows: rows with all keys but the newest.
        """
        steps = [self._count_steps(row) for row, _ in rows]
        fields = [(row.slot, row.start, count, count, -1, 0) for (row, _), count in zip(rows, steps, strict=True)]
        tokens = self._draft(fields, tables)
        for (_, drafts), count in zip(rows, steps, strict=True):
            self._add_keys(drafts, self._count_keys(count))
        return [tuple(tokens[: row.tokens - 1, place].tolist()) for place, (row, _) in enumerate(rows)]

    def forget(self, weights_version: int) -> None:
        """Clears the record of computed pages, which are about to be freed or have keys of old weights.

        Args:
          weights_version: number of `SchedulerState`. Pages of sequences that started with another are not recorded.
        """
        self._digests.clear()
        self._weights_version = weights_version

    @abstractmethod
    def _fill(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> None:
        """Launches the computation of keys of known tokens; see `Programs.fill`."""

    @abstractmethod
    def _draft(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> np.ndarray:
        """Runs the drafting steps of rows, as many as each has tokens, and returns the tokens, int32[steps, rows]."""

    @abstractmethod
    def _count_steps(self, row: Row) -> int:
        """Returns the number of steps that draft a row."""

    @abstractmethod
    def _count_keys(self, steps: int) -> int:
        """Returns the number of keys computed by drafting steps that stay valid if the drafts are accepted."""

    def _add_keys(self, drafts: ModelDrafts, tokens: int) -> None:
        """Records that the keys of the next tokens of a sequence are computed."""
        start = drafts.computed_tokens
        drafts.computed_tokens = start + tokens
        sequence = drafts.sequence
        # Hidden states of old weights give keys that later sequences must not find.
        is_current = sequence.weights_version == self._weights_version
        for number in range(start // self._page_tokens, -(-(start + tokens) // self._page_tokens)):
            is_full = (number + 1) * self._page_tokens <= min(start + tokens, sequence.computed_tokens)
            if is_current and is_full and number < len(sequence.digests):
                self._digests[sequence.pages[number]] = sequence.digests[number]
            else:
                self._digests.pop(sequence.pages[number], None)
