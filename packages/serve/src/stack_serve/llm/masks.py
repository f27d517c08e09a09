"""Masks of a step's constrained rows, and the ends of continuations whose constraint allows no token."""

from collections.abc import Sequence

import numpy as np

from stack_serve.llm.constraints import ConstraintCompiler, Matcher
from stack_serve.llm.dispatcher import End
from stack_serve.llm.work import Continuation

__all__ = ["masks_of_drafts", "masks_of_samples"]


def masks_of_samples(
    compiler: ConstraintCompiler, continuations: Sequence[Continuation | None]
) -> tuple[np.ndarray, list[End]]:
    """Computes the masks of the rows of a step that sample one token each.

    Args:
      continuations: continuation of each row; None if it has ended, and its token will be dropped.

    Returns:
      int32[rows, words], and the ends of continuations that cannot continue.
    """
    masks = compiler.masks([None if each is None else each.matcher for each in continuations])
    ends = list[End]()
    for mask, continuation in zip(masks, continuations, strict=True):
        if continuation is None or continuation.matcher is None:
            continue
        end = _end_without_token(compiler, continuation, continuation.matcher, mask)
        if end is not None:
            ends.append(end)
            mask[:] = -1
    return masks, ends


def masks_of_drafts(
    compiler: ConstraintCompiler,
    continuations: Sequence[Continuation],
    drafts: list[tuple[int, ...]],
    tokens: Sequence[int],
) -> tuple[np.ndarray, list[End]]:
    """Computes the masks of all positions of a step with drafts; shortens drafts after which a constraint ends.

    Args:
      continuations: continuation of each row.
      drafts: drafts of each row, which are modified.
      tokens: number of tokens of each row.

    Returns:
      int32[tokens, words], and the ends of continuations that cannot continue.
    """
    masks, ends = list[np.ndarray](), list[End]()
    for place, (continuation, count) in enumerate(zip(continuations, tokens, strict=True)):
        found = list[np.ndarray]()
        if continuation.matcher is not None:
            found, end = _masks_along(compiler, continuation, continuation.matcher, drafts[place])
            if end is not None and not found:
                ends.append(end)
            # A token is sampled after the last accepted draft, too, and needs a mask.
            drafts[place] = drafts[place][: max(len(found) - 1, 0)]
        masks += [*found, *compiler.masks([None] * (count - len(found)))]
    return np.stack(masks), ends


def _masks_along(
    compiler: ConstraintCompiler, continuation: Continuation, matcher: Matcher, drafted: tuple[int, ...]
) -> tuple[list[np.ndarray], End | None]:
    """Computes the masks before each drafted token and after the last, up to the end of the constraint."""
    # A copy, because the limits of the parser may be reached after a draft that is rejected.
    matcher, masks = matcher.copy(), list[np.ndarray]()
    for ahead in range(len(drafted) + 1):
        if ahead:
            matcher.advance(drafted[ahead - 1])
        (mask,) = compiler.masks([matcher])
        end = _end_without_token(compiler, continuation, matcher, mask, ahead=ahead)
        if end is not None:
            return masks, end
        masks.append(mask)
    return masks, None


def _end_without_token(
    compiler: ConstraintCompiler, continuation: Continuation, matcher: Matcher, mask: np.ndarray, *, ahead: int = 0
) -> End | None:
    """Returns the end of a constrained continuation if it cannot continue after `ahead` drafts, otherwise None.

    Args:
      matcher: position after the drafts.
      mask: tokens that it allows; end tokens are removed if they cannot end the continuation.
    """
    if matcher.error is not None:
        return End(continuation, "error", f"The constraint cannot be followed after this text: {matcher.error}.")
    if continuation.ending.allows_end_token(ahead=ahead):
        return None
    # `ignore_eos`, `min_tokens` or the model rules out the end tokens, so a complete text ends without one.
    mask &= compiler.text_tokens
    return None if mask.any() else End(continuation, "stop")
