"""A small model that drafts the next tokens of sequences for a larger one, with its own cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.drafts import Acceptance
from stack_serve.llm.programs import Key, Programs
from stack_serve.llm.scheduler import Row
from stack_serve.llm.sequence import Sequence as State

__all__ = ["DraftModel", "ModelDrafts", "check_vocabulary"]

# At this rate, most pairs of models are worth a trial of three drafts.
_FIRST_RATE = 0.8


class ModelDrafts(Acceptance):
    """Progress of the draft model on one sequence, and the acceptance of its drafts.

    Attributes:
      sequence: sequence of the served model.
      computed_tokens: number of tokens whose keys of the draft model are in the pages of the sequence.

    Args:
      pair: acceptance over all sequences, the initial estimate of this one.
    """

    def __init__(self, sequence: State, pair: Acceptance) -> None:
        super().__init__(pair.rate)
        self.sequence, self.computed_tokens = sequence, 0
        self._pair, self._preemptions = pair, 0

    @property
    def has_all_keys(self) -> bool:
        """True if the draft model can continue the sequence: only the key of the newest token is missing."""
        return self.computed_tokens == self.sequence.computed_tokens

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
          digests: digests of the pages that are filled with keys of the draft model, by page number.
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


class DraftModel:
    """Drafts tokens with a second model, whose keys are in pools of its own under the page numbers of the served model.

    Each drafted token is sampled like a token of the served model: with the settings of its sequence, and with the
    random numbers of its position, which `Step.verify` uses again. Greedy drafts are therefore the most likely tokens,
    and sampled drafts agree with the served model more often than the most likely tokens would. A draft only changes
    how many tokens a step generates, and never which ones, so any keys are correct; wrong ones lower the acceptance.
    The keys of prompts are computed when a sequence is drafted for the first time. Sequences with images are not
    drafted, because the draft model has no features of their images.

    Source: Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024
    (arXiv:2408.07978).

    Attributes:
      pair: acceptance over all sequences.
      cost: bytes of the parameters, relative to the served model; an estimate of the duration of a step.
      programs: programs and parameters of the draft model.

    Args:
      checkpoint: draft model.
      served: model that verifies the drafts.
      config: settings of the engine.
      max_tokens, pages: as in `Programs`.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        served: GenerativeCheckpoint,
        config: EngineConfig,
        *,
        max_tokens: int,
        pages: int,
    ) -> None:
        assert config.speculation is not None
        # The last step computes the key of the last drafted token, which would be missing if the token is accepted.
        changes: dict[str, Any] = {"decode_repeats": config.speculation.tokens + 1, "page_layout": None, "adapters": {}}
        config = replace(config, speculation=None, draft_model=None, **changes)
        self.programs = _DraftPrograms(checkpoint, config, max_tokens=max_tokens, pages=pages)
        self.pair = Acceptance(_FIRST_RATE)
        self.cost = _count_bytes(checkpoint) / _count_bytes(served)
        self._step_tokens, self._page_tokens = config.step_tokens, config.page_tokens
        self._max_positions = checkpoint.max_positions
        self._digests: dict[int, bytes] = {}

    def room(self, drafts: ModelDrafts) -> int:
        """Returns the number of tokens by which the draft model can continue a sequence, 0 after images."""
        if drafts.sequence.images:
            return 0
        return max(self._max_positions - len(drafts.sequence.tokens), 0)

    def catch_up(self, served: Programs, tables: np.ndarray, rows: Sequence[ModelDrafts]) -> bool:
        """Launches the computation of missing keys, up to `step_tokens` of them; returns whether any were missing.

        Args:
          served: programs of the served model, whose slots have the tokens.
          tables: int32[slots, pages], page numbers of each slot's sequence.
          rows: running sequences.
        """
        missing, room = list[tuple[int, ...]](), self._step_tokens
        for drafts in rows:
            sequence = drafts.sequence
            drafts.resume(self._digests, self._page_tokens)
            tokens = min(sequence.computed_tokens - drafts.computed_tokens, room)
            if tokens:
                assert sequence.slot is not None
                missing.append((sequence.slot, drafts.computed_tokens, tokens, 0, -1, 0))
                self._add_keys(drafts, tokens)
                room -= tokens
        if missing:
            self.programs.slots = served.slots
            self.programs.fill(missing, tables[[slot for slot, *_ in missing]])
        return bool(missing)

    def propose(
        self, served: Programs, tables: np.ndarray, rows: Sequence[tuple[Row, ModelDrafts]]
    ) -> list[tuple[int, ...]]:
        """Drafts the tokens that rows verify after their first token.

        Args:
          served: programs of the served model, whose slots have the tokens; drafts are written there.
          tables: int32[rows, pages], page numbers of each row's sequence.
          rows: rows with all keys but the newest.
        """
        self.programs.slots = served.slots
        steps = max(row.tokens for row, _ in rows)
        fields = [(row.slot, row.start, row.tokens, row.tokens, -1, 0) for row, _ in rows]
        result = self.programs.step(fields, tables, repeats=steps)
        served.slots = self.programs.slots
        for row, drafts in rows:
            self._add_keys(drafts, row.tokens)
        assert result.sampled is not None
        tokens = np.asarray(result.sampled.tokens)
        return [tuple(tokens[: row.tokens - 1, place].tolist()) for place, (row, _) in enumerate(rows)]

    def forget(self) -> None:
        """Clears the record of computed pages, which are about to be freed."""
        self._digests.clear()

    def _add_keys(self, drafts: ModelDrafts, tokens: int) -> None:
        """Records that the keys of the next tokens of a sequence are computed."""
        start = drafts.computed_tokens
        drafts.computed_tokens = start + tokens
        sequence = drafts.sequence
        for number in range(start // self._page_tokens, -(-(start + tokens) // self._page_tokens)):
            is_full = (number + 1) * self._page_tokens <= min(start + tokens, sequence.computed_tokens)
            if is_full and number < len(sequence.digests):
                self._digests[sequence.pages[number]] = sequence.digests[number]
            else:
                self._digests.pop(sequence.pages[number], None)


class _DraftPrograms(Programs):
    """Programs that compute keys of known tokens, and decode."""

    def _image_reader(self) -> None:
        return None

    def _keys(self) -> list[Key]:
        return [key for key in super()._keys() if key[0] in ("decode", "prefill")]

    def _first_keys(self) -> list[Key]:
        return []


def check_vocabulary(checkpoint: GenerativeCheckpoint, draft: GenerativeCheckpoint) -> None:
    """Raises a ConfigError if a draft model has other tokens than the served model."""
    ours, theirs = checkpoint.tokenizer, draft.tokenizer
    difference = None
    if checkpoint.vocab_size != draft.vocab_size:
        difference = f"{draft.vocab_size} tokens instead of {checkpoint.vocab_size}"
    elif ours is not None and theirs is not None:
        count = min(ours.vocab_size, theirs.vocab_size)
        other = (token for token in range(count) if ours.token_bytes(token) != theirs.token_bytes(token))
        if (token := next(other, None)) is not None:
            difference = f"token {token} is {theirs.token_bytes(token)!r} instead of {ours.token_bytes(token)!r}"
    if difference is not None:
        raise ConfigError(
            f"The draft model {draft.name!r} has another vocabulary than {checkpoint.name!r}: {difference}. "
            "Name a draft model with the same tokenizer."
        )


def _count_bytes(checkpoint: GenerativeCheckpoint) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(checkpoint.parameters))
