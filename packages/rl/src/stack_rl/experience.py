"""Conversion of trajectories to training batches with advantages and token weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from stack_core.abi.data import IGNORED_TARGET, Shapes
from stack_core.abi.errors import DataError
from stack_rl.contracts import Trajectory
from stack_rl.math.advantages import ADVANTAGES, equal_groups, gae, whitened_tokens
from stack_rl.math.weights import token_weights

__all__ = ["REFERENCE_LOGPROBS", "batch_of", "batch_shapes", "credited_by_values"]

REFERENCE_LOGPROBS: Final = "reference_logprobs"

_TOKENS: Final = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "advantages": np.float32,
    "weights": np.float32,
    "old_logprobs": np.float32,
}
_VALUES: Final = ("old_values", "returns")
# Objectives report the mean of each of these, as they do of every array[rows] except `real`, `dropped` and `share`.
_OF_EPISODES: Final = ("reward", "correct", "unchecked", "unparsed", "action_tokens", "staleness", "truncated")
_OF_GROUPS: Final = ("flat_groups", "drawn_groups")
_ROWS: Final = ("real", "dropped", "share", *_OF_EPISODES, *_OF_GROUPS)


def batch_shapes(
    rows: int, seq_tokens: int, *, values: bool = False, candidates: int = 0, reference: bool = False
) -> Shapes:
    """Returns the arrays of a batch: token arrays are [rows, seq_tokens], row arrays [rows].

    Args:
      rows: number of rows.
      seq_tokens: number of tokens per row.
      values: include the arrays that `credited_by_values` adds.
      candidates: maximum number of candidates per target, stored as int32[rows, seq_tokens, candidates] and padded with
        -1. 0 omits the array, because all tokens are candidates.
      reference: include the reference's log-probabilities of the targets.
    """
    more = (*(_VALUES if values else ()), *((REFERENCE_LOGPROBS,) if reference else ()))
    dtypes = _TOKENS | dict.fromkeys(more, np.float32)
    tokens = {name: jax.ShapeDtypeStruct((rows, seq_tokens), np.dtype(dtype)) for name, dtype in dtypes.items()}
    if candidates:
        tokens["candidates"] = jax.ShapeDtypeStruct((rows, seq_tokens, candidates), np.dtype(np.int32))
    return tokens | {name: jax.ShapeDtypeStruct((rows,), np.dtype(np.float32)) for name in _ROWS}


def batch_of(
    trajectories: Sequence[Trajectory | None], *, shapes: Shapes, advantage: str | None, weights: str, version: int
) -> dict[str, np.ndarray]:
    """Builds a batch with one trajectory per row; spare rows and dropped trajectories (None) become padding.

    Padding is marked by ignored targets and segment 0, not by its token ids, so an end token that is also the padding
    token is still learned.

    Args:
      trajectories: trajectories of the batch, at most one per row.
      shapes: shapes of the batch.
      advantage: key of `ADVANTAGES`; None sets all advantages to 0.
      weights: name of a weighting in `token_weights`.
      version: version of the weights that the batch will train.

    Raises:
      DataError: the number of a token's candidates exceeds the batch's maximum.
    """
    batch = {name: np.zeros(each.shape, each.dtype) for name, each in shapes.items()}
    rows, seq_tokens = batch["targets"].shape
    batch["targets"][:] = IGNORED_TARGET
    batch["share"][:], batch["drawn_groups"][:] = 1 / rows, 1.0
    if "candidates" in batch:
        batch["candidates"][:] = -1
    batch["dropped"][: len(trajectories)] = [each is None for each in trajectories]
    there = np.asarray([row for row, each in enumerate(trajectories) if each is not None], np.int64)
    found = [each for each in trajectories if each is not None]
    for row, trajectory in zip(there, found, strict=True):
        _lay_out(batch, int(row), trajectory, version)
    groups = np.asarray([each.group for each in found], np.int64)
    rewards, lengths = batch["reward"][there], batch["action_tokens"][there].astype(np.int64)
    credit = np.zeros(len(found)) if advantage is None else ADVANTAGES[advantage](rewards.astype(np.float64), groups)
    drawn = batch["targets"] != IGNORED_TARGET
    weigh = token_weights(weights, lengths, groups, max_tokens=seq_tokens)
    batch["advantages"][there] = drawn[there] * credit[:, None]
    batch["weights"][there] = drawn[there] * weigh[:, None]
    batch["flat_groups"][there] = equal_groups(rewards, groups) & _has_siblings(groups)
    return batch


def credited_by_values(
    batch: Mapping[str, np.ndarray],
    trajectories: Sequence[Trajectory | None],
    values: np.ndarray,
    *,
    discount: float,
    decay: float,
    whiten: bool,
) -> dict[str, np.ndarray]:
    """Returns a batch of `batch_of` with advantages estimated from a critic's values.

    Args:
      batch: batch whose advantages are replaced.
      trajectories: trajectories of the batch, which provide the rewards.
      values: the critic's value at each target, [rows, seq_tokens].
      discount, decay: gamma and lambda of `gae`.
      whiten: whiten the advantages over the batch. `returns` use the advantages before whitening.
    """
    drawn = batch["targets"] != IGNORED_TARGET
    rewards, expected = np.zeros(drawn.shape), np.where(drawn, values, 0).astype(np.float64)
    for row, each in enumerate(trajectories):
        if each is not None:
            # Targets are tokens 1, 2, ..., so rewards shift by one as well.
            rewards[row, : len(each.tokens) - 1] = each.rewards[1:]
    advantages = gae(rewards, expected, drawn, discount=discount, decay=decay)
    found = {
        "advantages": whitened_tokens(advantages, drawn) if whiten else advantages,
        "old_values": expected,
        "returns": np.where(drawn, advantages + expected, 0),
    }
    return {**batch, **{name: array.astype(np.float32) for name, array in found.items()}}


def _lay_out(batch: Mapping[str, np.ndarray], row: int, trajectory: Trajectory, version: int) -> None:
    # Position t predicts token t + 1, so arrays about sampled tokens shift by one.
    sampled, count = trajectory.sampled[1:], len(trajectory.tokens) - 1
    of_tokens = {
        "tokens": trajectory.tokens[:-1],
        "targets": np.where(sampled, trajectory.tokens[1:], IGNORED_TARGET),
        "positions": np.arange(count),
        "segment_ids": np.ones(count),
        "old_logprobs": trajectory.logprobs[1:],
    }
    of_row = {
        "real": 1.0,
        "reward": trajectory.rewards.sum(),
        "correct": trajectory.verdict == "correct",
        "unchecked": trajectory.verdict in ("timeout", "crash"),
        "unparsed": trajectory.verdict == "unparsed",
        "action_tokens": sampled.sum(),
        "staleness": version - trajectory.versions[trajectory.sampled].min(initial=version),
        "truncated": trajectory.is_truncated,
    }
    if "candidates" in batch:
        _lay_out_candidates(batch["candidates"][row], trajectory)
    for name, values in of_tokens.items():
        batch[name][row, :count] = values
    for name, value in of_row.items():
        batch[name][row] = value


def _lay_out_candidates(into: np.ndarray, trajectory: Trajectory) -> None:
    """Writes the candidates of each target to `into`; a greedily chosen token is its only candidate."""
    tokens, none = trajectory.tokens, np.zeros(0, np.int32)
    counts, candidates = trajectory.candidates or (np.zeros(len(tokens), np.int32), none)
    if (most := int(counts.max(initial=0))) > into.shape[1]:
        raise DataError(
            f"A token was drawn from {most} candidates, but data.most_candidates is {into.shape[1]}. Raise it, or "
            "lower data.top_p or data.top_k."
        )
    ends = np.cumsum(counts)
    for target in np.flatnonzero(trajectory.sampled[1:]) + 1:
        # Candidates are concatenated over tokens; the last one of `target` is at ends[target] - 1.
        own = candidates[ends[target] - counts[target] : ends[target]]
        own = own if len(own) else tokens[target : target + 1]
        into[target - 1, : len(own)] = own


def _has_siblings(groups: Any) -> np.ndarray:
    """Returns True for each episode whose group has further episodes."""
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[place] > 1
