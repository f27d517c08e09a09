"""Conversion of trajectories to training batches with advantages and token weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from stack_core.abi.data import IGNORED_TARGET, Shapes
from stack_core.abi.errors import DataError
from stack_rl.contracts import Trajectory
from stack_rl.episode_images import lay_out_images
from stack_rl.math.advantages import ADVANTAGES, equal_groups, gae, kl_to_go, overlong, whitened_tokens
from stack_rl.math.weights import token_weights
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.reward_parts import lay_out_parts
from stack_rl.sampling import AS_MODEL, PolicySampling

__all__ = ["REFERENCE_LOGPROBS", "batch_of", "batch_shapes", "credited", "overlong_rewards", "update_batch"]

REFERENCE_LOGPROBS: Final = "reference_logprobs"

_TOKENS: Final = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "advantages": np.float32,
    "weights": np.float32,
    "behaviour_logprobs": np.float32,
}
# Objectives report the mean over episodes of each of these, as of every array[rows] except `real`, `dropped` and
# `share`. `real` is the number of episodes of a row; `padding` is the padding of the whole batch.
_OF_EPISODES: Final = ("reward", "correct", "unchecked", "unparsed", "action_tokens", "staleness", "truncated")
_OF_GROUPS: Final = ("flat_groups", "drawn_groups", "replayed_groups")
_ROWS: Final = ("real", "dropped", "share", "padding", *_OF_EPISODES, *_OF_GROUPS)


def batch_shapes(
    rows: int,
    seq_tokens: int,
    algorithm: PolicyConfig,
    *,
    candidates: int = 0,
    sampling: PolicySampling = AS_MODEL,
    temperatures: bool = False,
    reference: bool = False,
    experts: tuple[int, int] | None = None,
) -> Shapes:
    """Returns the arrays of a batch: token arrays are [rows, seq_tokens], row arrays [rows].

    Args:
      rows: number of rows.
      seq_tokens: number of tokens per row.
      algorithm: the algorithm, whose parts need further arrays.
      candidates: maximum number of candidates per target, stored as int32[rows, seq_tokens, candidates] and padded with
        -1. 0 omits the array, because all tokens are candidates.
      sampling: sampling settings; a temperature and penalties need further arrays, see `sampled_figures`.
      temperatures: include the temperature of each token, because actions may have their own.
      reference: include the reference's log-probabilities of the targets.
      experts: numbers of mixtures and of active experts in each; includes the experts of each token, stored as
        int16[rows, seq_tokens, mixtures, active] and -1 if unknown. None omits them.
    """
    more = {
        "old_logprobs": algorithm.has_old_logprobs,
        "old_values": algorithm.has_critic,
        "returns": algorithm.has_critic,
        REFERENCE_LOGPROBS: reference,
    }
    dtypes = _TOKENS | {name: np.float32 for name, is_there in more.items() if is_there}
    tokens = {name: jax.ShapeDtypeStruct((rows, seq_tokens), np.dtype(dtype)) for name, dtype in dtypes.items()}
    if candidates:
        tokens["candidates"] = jax.ShapeDtypeStruct((rows, seq_tokens, candidates), np.dtype(np.int32))
    if experts:
        tokens["experts"] = jax.ShapeDtypeStruct((rows, seq_tokens, *experts), np.dtype(np.int16))
    if sampling.temperature != 1 or temperatures:
        tokens["temperature"] = jax.ShapeDtypeStruct((rows, seq_tokens), np.dtype(np.float32))
    if sampling.is_penalized:
        tokens["penalties"] = jax.ShapeDtypeStruct((rows, seq_tokens, 3), np.dtype(np.float32))
        tokens["generated_tokens"] = jax.ShapeDtypeStruct((rows, seq_tokens), np.dtype(np.int32))
    facts = {
        "reward_kl": algorithm.has_reward_kl,
        "overlong": algorithm.overlong is not None,
        "skipped_updates": algorithm.target_kl is not None,
    }
    names = (*_ROWS, *(name for name, is_there in facts.items() if is_there))
    return tokens | {name: jax.ShapeDtypeStruct((rows,), np.dtype(np.float32)) for name in names}


def batch_of(
    trajectories: Sequence[Trajectory | None],
    *,
    shapes: Shapes,
    version: int,
    sampling: PolicySampling = AS_MODEL,
) -> dict[str, np.ndarray]:
    """Lays out one trajectory per row, without advantages and weights; dropped trajectories (None) become padding.

    Padding is marked by ignored targets and segment 0, not by its token ids, so an end token that is also the padding
    token is still learned. `old_logprobs` are those of the behaviour until `credited` replaces them.

    Args:
      trajectories: trajectories of the batch, at most one per row.
      shapes: shapes of the batch.
      version: version of the weights that the batch will train.
      sampling: sampling settings of the episodes; AS_MODEL for greedy ones.

    Raises:
      DataError: the number of a token's candidates, or of an episode's images, exceeds the batch's maximum.
    """
    batch = {name: np.zeros(each.shape, each.dtype) for name, each in shapes.items()}
    batch["targets"][:] = IGNORED_TARGET
    batch["drawn_groups"][:] = 1.0
    for name in {"candidates", "experts"} & batch.keys():
        batch[name][:] = -1
    if "temperature" in batch:
        batch["temperature"][:] = sampling.temperature
    if "penalties" in batch:
        batch["penalties"][:] = sampling.penalties
    batch["dropped"][: len(trajectories)] = [each is None for each in trajectories]
    there, found = _present(trajectories)
    for row, trajectory in zip(there, found, strict=True):
        _lay_out(batch, int(row), trajectory, version)
        lay_out_parts(batch, int(row), trajectory)
        lay_out_images(batch, int(row), trajectory)
    if "old_logprobs" in batch:
        batch["old_logprobs"][:] = batch["behaviour_logprobs"]
    groups = _groups(found)
    batch["flat_groups"][there] = equal_groups(batch["reward"][there], groups) & _has_siblings(groups)
    return batch


def credited(
    batch: Mapping[str, np.ndarray],
    trajectories: Sequence[Trajectory | None],
    algorithm: PolicyConfig,
    scores: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns a batch of `batch_of` with an algorithm's advantages, old values and old log-probabilities.

    Args:
      batch: the batch.
      trajectories: trajectories of the batch, which provide the rewards.
      algorithm: estimator of the advantages, with the parts of the reward that it adds.
      scores: scores of `PolicyObjective.scores` before the first update, each [rows, seq_tokens].
    """
    batch, drawn = dict(batch), batch["targets"] != IGNORED_TARGET
    there, found = _present(trajectories)
    rewards = _token_rewards(drawn.shape, trajectories)
    last = drawn & (np.cumsum(drawn[:, ::-1], axis=1)[:, ::-1] == 1)
    extra = overlong_rewards(algorithm, found)
    rewards[there] += extra[:, None] * last[there]
    if algorithm.overlong is not None:
        batch["overlong"] = _in_rows(there, _excluded(algorithm, found) - extra, len(drawn)).astype(np.float32)
    k1 = np.zeros(drawn.shape)
    if algorithm.has_reward_kl:
        # With `reference: data`, the data's reference has scored the batch already.
        reference = scores[REFERENCE_LOGPROBS] if REFERENCE_LOGPROBS in scores else batch[REFERENCE_LOGPROBS]
        k1 = np.where(drawn, batch["behaviour_logprobs"].astype(np.float64) - reference, 0)
        batch["reward_kl"] = k1.sum(axis=1).astype(np.float32)
    if algorithm.has_old_logprobs:
        batch["old_logprobs"] = np.where(drawn, scores["policy_logprobs"], 0).astype(np.float32)
    if isinstance(algorithm, PPOConfig):
        values = np.where(drawn, scores["values"], 0).astype(np.float64)
        how = {"discount": algorithm.gae_gamma, "decay": algorithm.gae_lambda}
        advantages = gae(rewards - algorithm.kl * k1, values, drawn, **how)
        batch["old_values"] = values.astype(np.float32)
        batch["returns"] = np.where(drawn, advantages + values, 0).astype(np.float32)
        advantages = whitened_tokens(advantages, drawn) if algorithm.whiten_advantages else advantages
    elif algorithm.advantage == "returns":
        returns = kl_to_go(rewards.sum(axis=1), k1, drawn, coefficient=algorithm.kl)
        advantages = whitened_tokens(returns, drawn)
    else:
        totals = (rewards - algorithm.kl * k1)[there].sum(axis=1)
        credit = ADVANTAGES[algorithm.advantage](totals, _groups(found))
        advantages = drawn * _in_rows(there, credit, len(drawn))[:, None]
    batch["advantages"] = advantages.astype(np.float32)
    return batch


def update_batch(
    batch: Mapping[str, np.ndarray],
    rows: np.ndarray,
    trajectories: Sequence[Trajectory | None],
    algorithm: PolicyConfig,
) -> dict[str, np.ndarray]:
    """Returns rows of a batch as the batch of one update, with the weights of its tokens.

    Args:
      batch: the batch.
      rows: rows of the update.
      trajectories: trajectories of the batch; rows without one are padding.
      algorithm: the algorithm, whose aggregation weights the update's tokens.
    """
    chosen = {name: array[rows] for name, array in batch.items()}
    here = [trajectories[row] if row < len(trajectories) else None for row in rows]
    there, found = _present(here)
    drawn = chosen["targets"] != IGNORED_TARGET
    lengths = drawn[there].sum(axis=1).astype(np.int64)
    lengths[_excluded(algorithm, found)] = 0
    weigh = token_weights(algorithm.loss_aggregation, lengths, _groups(found), max_tokens=drawn.shape[1])
    chosen["weights"] = np.zeros(drawn.shape, np.float32)
    chosen["weights"][there] = drawn[there] * (weigh * (lengths > 0))[:, None]
    chosen["share"] = np.full(len(rows), 1 / len(rows), np.float32)
    # The same in all rows, so that its mean does not depend on the number of episodes in a row.
    chosen["padding"] = np.full(len(rows), np.mean(chosen["segment_ids"] == 0), np.float32)
    return chosen


def _present(trajectories: Sequence[Trajectory | None]) -> tuple[np.ndarray, list[Trajectory]]:
    """Returns the rows that have a trajectory, and their trajectories."""
    rows = np.asarray([row for row, each in enumerate(trajectories) if each is not None], np.int64)
    return rows, [each for each in trajectories if each is not None]


def _groups(trajectories: Sequence[Trajectory]) -> np.ndarray:
    return np.asarray([each.group for each in trajectories], np.int64)


def _in_rows(rows: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count)
    found[rows] = values
    return found


def _token_rewards(shape: tuple[int, ...], trajectories: Sequence[Trajectory | None]) -> np.ndarray:
    """Returns the reward of each target; targets are tokens 1, 2, ..., so rewards shift by one as well."""
    rewards = np.zeros(shape)
    for row, each in enumerate(trajectories):
        if each is not None:
            rewards[row, : len(each.tokens) - 1] = each.rewards[1:]
    return rewards


def overlong_rewards(algorithm: PolicyConfig, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Returns what long answers add to their reward: at most 0, and 0 for answers whose limit is unknown."""
    settings = algorithm.overlong
    lengths = np.asarray([int(each.sampled.sum()) for each in trajectories], np.float64)
    if settings is None or settings.kind != "penalize":
        return np.zeros(len(lengths))
    limits = np.asarray([np.inf if each.limit_tokens is None else each.limit_tokens for each in trajectories])
    known = np.isfinite(limits)
    limits = np.where(known, limits, 1.0)
    penalty = overlong(lengths, max_tokens=limits, buffer_tokens=settings.buffer_fraction * limits)
    return np.where(known, penalty, 0.0)


def _excluded(algorithm: PolicyConfig, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Returns True for answers that are excluded from the loss because their limit cut them."""
    masks = algorithm.overlong is not None and algorithm.overlong.kind == "mask"
    return np.asarray([masks and each.is_cut for each in trajectories], bool)


def _lay_out(batch: Mapping[str, np.ndarray], row: int, trajectory: Trajectory, version: int) -> None:
    # Position t predicts token t + 1, so arrays about sampled tokens shift by one.
    sampled, count = trajectory.sampled[1:], len(trajectory.tokens) - 1
    # Branches are segments, which do not attend to each other. The first token of a branch is never a target.
    starts = np.asarray(trajectory.branch_starts or (0,))
    branches = np.searchsorted(starts, np.arange(count), side="right")
    of_tokens = {
        "tokens": trajectory.tokens[:-1],
        "targets": np.where(sampled, trajectory.tokens[1:], IGNORED_TARGET),
        "positions": np.arange(count) - starts[branches - 1],
        "segment_ids": branches,
        "behaviour_logprobs": trajectory.logprobs[1:],
    }
    of_row = {
        "real": 1.0,
        "reward": trajectory.rewards.sum(),
        "correct": trajectory.verdict == "correct",
        "unchecked": trajectory.verdict in ("timeout", "crash"),
        "unparsed": trajectory.verdict == "unparsed",
        "action_tokens": sampled.sum(),
        "staleness": version - trajectory.versions[trajectory.sampled].min(initial=version),
        "truncated": trajectory.is_unfinished,
    }
    if "generated_tokens" in batch:
        of_tokens["generated_tokens"] = _generated_tokens(trajectory)[1:]
    if "temperature" in batch and trajectory.action_temperatures:
        temperatures = np.asarray([0.0, *trajectory.action_temperatures], np.float32)
        actions = np.searchsorted(trajectory.action_starts, np.arange(count) + 1, side="right")
        of_tokens["temperature"] = np.where(sampled, temperatures[actions], batch["temperature"][row, :count])
    if "experts" in batch and trajectory.experts is not None:
        of_tokens["experts"] = trajectory.experts[:-1]
    if "candidates" in batch:
        _lay_out_candidates(batch["candidates"][row], trajectory)
    for name, values in of_tokens.items():
        batch[name][row, :count] = values
    for name, value in of_row.items():
        batch[name][row] = value


def _generated_tokens(trajectory: Trajectory) -> np.ndarray:
    """Returns the number of tokens of the same action before each sampled token; 0 elsewhere."""
    places = np.arange(len(trajectory.tokens))
    starts = np.zeros_like(places)
    starts[list(trajectory.action_starts)] = trajectory.action_starts
    return np.where(trajectory.sampled, places - np.maximum.accumulate(starts), 0)


def _lay_out_candidates(into: np.ndarray, trajectory: Trajectory) -> None:
    """Writes the candidates of each target to `into`; a greedily chosen token is its only candidate."""
    tokens, none = trajectory.tokens, np.zeros(0, np.int32)
    counts, candidates = trajectory.candidates or (np.zeros(len(tokens), np.int32), none)
    if (most := int(counts.max(initial=0))) > into.shape[1]:
        raise DataError(
            f"A token was drawn from {most} candidates, but data.max_candidates is {into.shape[1]}. Raise it, or "
            "lower data.top_p or data.top_k, or raise data.min_p."
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
