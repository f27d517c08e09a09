"""A small model that drafts the next tokens of sequences for a larger one, with its own cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.llm.compiled_programs import Key
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.programs import Programs
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.scheduler_state import Row

__all__ = ["DraftModel", "check_vocabulary"]


class DraftModel(Proposer):
    """Drafts tokens with a second model, which has programs of its own.

    Args:
      checkpoint: draft model.
      served: model that verifies the drafts.
      served_programs: programs of that model.
      config: settings of the engine.
      max_tokens, pages: as in `Programs`.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        served: GenerativeCheckpoint,
        served_programs: Programs,
        config: EngineConfig,
        *,
        max_tokens: int,
        pages: int,
    ) -> None:
        assert config.speculation is not None
        changes: dict[str, Any] = {"decode_repeats": config.speculation.tokens + 1, "page_layout": None, "adapters": {}}
        config = replace(config, speculation=None, draft_model=None, **changes)
        programs = _DraftPrograms(checkpoint, config, max_tokens=max_tokens, pages=pages)
        cost = _count_bytes(checkpoint) / _count_bytes(served)
        super().__init__(served_programs, programs, config, cost=cost, max_positions=checkpoint.max_positions)

    def _fill(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> None:
        self.programs.slots = self.served.slots
        self.programs.fill(rows, tables)

    def _draft(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> np.ndarray:
        self.programs.slots = self.served.slots
        result = self.programs.step(rows, tables, repeats=max(steps for _, _, steps, *_ in rows))
        self.served.slots = self.programs.slots
        assert result.sampled is not None
        return np.asarray(result.sampled.tokens)

    def _count_steps(self, row: Row) -> int:
        # The last step computes the key of the last drafted token, which would be missing if the token is accepted.
        return row.tokens

    def _count_keys(self, steps: int) -> int:
        return steps


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
