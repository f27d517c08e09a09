"""Packing of uncut examples into rows of equal length, planned once."""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import DataError
from stack_core.text.packing import best_fit
from stack_train.data.conversations import Conversation

__all__ = ["TooLong", "fitting", "laid_out", "plan_rows", "stacked"]

TooLong = Literal["error", "drop", "cut"]
"""Policy for examples longer than a row: raise, leave out, or keep the beginning."""


def fitting(examples: Sequence[Conversation], seq_tokens: int, too_long: TooLong) -> list[Conversation]:
    """Returns the examples that fit a row of `seq_tokens` inputs, after cutting longer ones if `too_long` is "cut".

    An example of n tokens has n - 1 inputs. Cut examples without any of the assistant's tokens are dropped.

    Raises:
      DataError: an example is too long and `too_long` is "error", or all examples were dropped.
    """
    longer = [example for example in examples if len(example.tokens) > seq_tokens + 1]
    if longer and too_long == "error":
        most = max(longer, key=lambda example: len(example.tokens))
        raise DataError(
            f"{len(longer)} of {len(examples)} examples are longer than data.seq_tokens={seq_tokens}; {most.name} has "
            f"{len(most.tokens)} tokens. Raise data.seq_tokens, or set data.too_long to drop (leaves them out) or cut "
            "(keeps their beginnings)."
        )
    kept = [example for example in examples if len(example.tokens) <= seq_tokens + 1]
    if too_long == "cut":
        kept += [
            Conversation(example.name, example.tokens[: seq_tokens + 1], example.supervised[: seq_tokens + 1])
            for example in longer
            # The first token of an example is only an input.
            if example.supervised[1 : seq_tokens + 1].any()
        ]
    if not kept:
        raise DataError(f"None of {len(examples)} examples fits data.seq_tokens={seq_tokens}. Raise it.")
    return kept


def plan_rows(
    lengths: Int64[np.ndarray, " examples"], row_tokens: int, *, packed: bool
) -> list[Int64[np.ndarray, " in_row"]]:
    """Assigns examples to rows: by `best_fit` if `packed`; otherwise one example per row."""
    if not packed:
        return [np.asarray([index]) for index in range(len(lengths))]
    order, starts = best_fit(lengths, row_tokens)
    return [order[start:end] for start, end in itertools.pairwise(starts)]


def laid_out(examples: Sequence[Conversation], seq_tokens: int) -> dict[str, Int32[np.ndarray, " seq"]]:
    """Lays examples into one row.

    Returns:
      int32[seq] arrays: tokens; targets, -100 for tokens that are not the assistant's; positions; and segment_ids, from
      1 and 0 in padding.
    """
    row = {name: np.zeros(seq_tokens, np.int32) for name in ("tokens", "positions", "segment_ids")}
    row["targets"] = np.full(seq_tokens, IGNORED_TARGET, np.int32)
    begin = 0
    for segment, example in enumerate(examples, start=1):
        places = slice(begin, begin + len(example.tokens) - 1)
        row["tokens"][places] = example.tokens[:-1]
        row["targets"][places] = np.where(example.supervised[1:], example.tokens[1:], IGNORED_TARGET)
        row["positions"][places] = np.arange(len(example.tokens) - 1)
        row["segment_ids"][places] = segment
        begin = places.stop
    return row


def stacked(rows: Sequence[dict[str, Shaped[np.ndarray, "..."]]]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    """Stacks rows into a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
