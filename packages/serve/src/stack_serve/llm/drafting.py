"""Chooses the steps of an engine that verify drafts, and the drafts of their rows."""

import time
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from stack_serve.llm.buckets import Buckets
from stack_serve.llm.config import SpeculationConfig
from stack_serve.llm.drafts import Drafts
from stack_serve.llm.proposer import ModelDrafts, Proposer
from stack_serve.llm.scheduler_state import Plan, Row, SchedulerState
from stack_serve.llm.sequence import Sequence
from stack_serve.llm.speculation import Speculation
from stack_serve.llm.work import Continuation

__all__ = ["Drafting"]


class Drafting:
    """Chooses the drafts of an engine's steps, between the steps of its thread.

    Attributes:
      speculation: measured durations, from which the number of drafted tokens is chosen.

    Args:
      config: settings of speculation.
      state: state of the scheduler.
      continuations: unfinished continuations by sequence id.
      buckets: shapes of the programs of the served model.
      proposer: model that drafts; None copies drafts from the text.
      end_tokens: end tokens of the served model.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        state: SchedulerState,
        continuations: Mapping[int, Continuation],
        *,
        buckets: Buckets,
        proposer: Proposer | None,
        end_tokens: Collection[int],
    ) -> None:
        self._config, self._state, self._continuations = config, state, continuations
        self._proposer, self._end_tokens = proposer, end_tokens
        self._filled_keys = 0
        self.speculation = Speculation(buckets, config.tokens, None if proposer is None else proposer.cost)

    def new_drafter(self, sequence: Sequence) -> Drafts | ModelDrafts:
        """Creates the drafter of a sequence; any thread may call this."""
        if self._proposer is not None:
            return ModelDrafts(sequence, self._proposer.pair)
        return Drafts(self._config, sequence.tokens, sequence.max_total_tokens)

    def pays(self) -> bool:
        """Returns whether the next step should verify drafts, for which the step in flight is read first."""
        if not self._state.running or (self._proposer is not None and self._proposer.programs.to_compile):
            return False
        # A step with prompts verifies no drafts.
        if any(sequence.total_tokens - sequence.computed_tokens > 1 for sequence in self._state.running):
            return False
        rows = [drafts for _, drafts in self._drafters()]
        return self.speculation.pays(rows, self._available(rows))

    def choose(self) -> dict[int, tuple[int, ...]]:
        """Returns the drafts to verify in the next step by sequence id; the host knows all tokens.

        The tokens of a proposer are zeros until the step is planned, since its keys need the pages of the plan.
        """
        if self._proposer is not None:
            return self._choose_lengths(self._proposer)
        drafters = [(each, drafts) for each, drafts in self._drafters() if isinstance(drafts, Drafts)]
        drafted = [self._allowed(each, drafts.draft()) for each, drafts in drafters]
        lengths = self.speculation.choose([drafts for _, drafts in drafters], list(map(len, drafted)))
        chosen = zip(drafters, drafted, lengths, strict=True)
        return {continuation.sequence.id: tokens[:length] for (continuation, _), tokens, length in chosen if length}

    def _choose_lengths(self, proposer: Proposer) -> dict[int, tuple[int, ...]]:
        """Chooses the rows to draft with the proposer, and launches the computation of their missing keys."""
        rows = [drafts for _, drafts in self._drafters() if isinstance(drafts, ModelDrafts)]
        lengths = self.speculation.choose(rows, self._available(rows))
        chosen = [(each, length) for each, length in zip(rows, lengths, strict=True) if length]
        self._filled_keys = proposer.catch_up(self._state.block_tables, [each for each, _ in chosen])
        return {each.sequence.id: (0,) * length for each, length in chosen if each.has_all_keys}

    def draft(self, plan: Plan, tables: np.ndarray) -> tuple[list[int], list[tuple[int, ...]], float | None]:
        """Drafts the tokens of a planned step with drafts.

        Args:
          tables: int32[rows, pages], page numbers of each row's sequence.

        Returns:
          The tokens that the step computes, row by row; the drafts of each row that may be accepted; and the time that
          the proposer took in seconds, None if it had to catch up, which is not measured.
        """
        took_s: float | None = 0.0
        drafts = list(plan.drafts)
        if self._proposer is not None:
            drafts, took_s = self._propose(self._proposer, plan.rows, tables)
        rows = list(zip(plan.rows, drafts, strict=True))
        tokens = [token for row, drafted in rows for token in (row.sequence.tokens[-1], *drafted)]
        if self._proposer is not None:
            # Only now, because the step computes rejected drafts, too.
            drafts = [self._allowed(self._continuations[row.sequence.id], drafted) for row, drafted in rows]
        return tokens, drafts, took_s

    def forget(self) -> None:
        """Clears the record of pages with keys of the proposer, after the scheduler has cleared the prefix cache."""
        if self._proposer is not None:
            self._proposer.forget(self._state.weights_version)

    def _propose(
        self, proposer: Proposer, rows: tuple[Row, ...], tables: np.ndarray
    ) -> tuple[list[tuple[int, ...]], float | None]:
        """Returns the drafts of each row by the proposer, and the time that it took (see `draft`)."""
        started_s = time.monotonic()
        # Rows without drafts take part, too, if only the newest key is missing; it would be missing later.
        places = [
            (place, drafts)
            for place, row in enumerate(rows)
            if isinstance(drafts := self._continuations[row.sequence.id].drafts, ModelDrafts)
            and drafts.computed_tokens == row.start
        ]
        found = proposer.propose(
            tables[[place for place, _ in places]], [(rows[place], drafts) for place, drafts in places]
        )
        all_drafts: list[tuple[int, ...]] = [()] * len(rows)
        for (place, _), drafted in zip(places, found, strict=True):
            all_drafts[place] = drafted
        took_s, steps = time.monotonic() - started_s, max(row.tokens for row in rows)
        if self._filled_keys:
            self.speculation.record_filling(self._filled_keys, len(places), steps, took_s)
            return all_drafts, None
        self.speculation.record_drafting(len(places), steps, took_s)
        return all_drafts, took_s

    def _drafters(self) -> Iterator[tuple[Continuation, Drafts | ModelDrafts]]:
        """Yields the running continuations with their drafters."""
        running = (self._continuations[sequence.id] for sequence in self._state.running)
        return ((continuation, continuation.drafts) for continuation in running if continuation.drafts is not None)

    def _available(self, rows: Collection[Drafts | ModelDrafts]) -> list[int]:
        """Returns the maximum number of drafted tokens of each row."""
        proposer = self._proposer
        if proposer is None:
            return [self.speculation.tokens] * len(rows)
        own = [each for each in rows if isinstance(each, ModelDrafts)]
        missing = list(map(proposer.count_missing_keys, own))
        # The tokens to come must repay the computation of the missing keys, such as those of a long prompt.
        repaid = self.speculation.repaid_keys(len(own), proposer.pair) if any(missing) else 0.0
        return [
            0 if keys > each.remaining_tokens * repaid else min(self.speculation.tokens, proposer.room(each))
            for each, keys in zip(own, missing, strict=True)
        ]

    def _allowed(self, continuation: Continuation, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the first tokens of a draft that the constraint of a continuation allows."""
        matcher = continuation.matcher
        return drafted if matcher is None else drafted[: matcher.allowed(drafted, self._end_tokens)]
