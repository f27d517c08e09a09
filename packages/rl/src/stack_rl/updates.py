"""Updates of a batch: their order, and the position within them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import IGNORED_TARGET, Batch
from stack_core.abi.errors import ConfigError
from stack_rl.contracts import Trajectory
from stack_rl.experience import update_batch
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.replay import ReplayBuffer

__all__ = ["CurrentBatch", "check_minibatches", "mean_kl", "update_rows"]

# Second number of the seed of the order of rows; `supply` has the seeds of sampling.
_ORDER = 2


@dataclass
class CurrentBatch:
    """A batch that is used for several updates.

    Attributes:
      number: number of the batch in the run.
      arrays: all rows, with advantages.
      trajectories: trajectory of each row; None for dropped ones.
      policy_logprobs: log-probabilities of the targets under the policy before the first update; None if not needed.
      algorithm: the algorithm.
      seed: seed of the order of rows.
      before: state of the ledger before the batch.
      replay_before: buffer of stored groups before the batch.
      next_update: number of the next update within the batch, from 0.
    """

    number: int
    arrays: Mapping[str, np.ndarray]
    trajectories: Sequence[Trajectory | None]
    policy_logprobs: np.ndarray | None
    algorithm: PolicyConfig
    seed: int
    before: Mapping[str, Any]
    replay_before: ReplayBuffer
    next_update: int = 0

    @property
    def remaining(self) -> int:
        """Number of remaining updates."""
        return self.algorithm.updates - self.next_update

    def rows(self) -> Int64[np.ndarray, " rows"]:
        """Returns the rows of the next update."""
        count = len(self.arrays["targets"])
        return update_rows(count, self.algorithm, seed=(self.seed, self.number), update=self.next_update)

    def take(self) -> Batch:
        """Returns the batch of the next update."""
        found = update_batch(self.arrays, self.rows(), self.trajectories, self.algorithm)
        self.next_update += 1
        return found


def update_rows(count: int, algorithm: PolicyConfig, *, seed: Sequence[int], update: int) -> Int64[np.ndarray, " rows"]:
    """Returns the rows of an update, in ascending order.

    Each epoch visits every row once, in a new random order.

    Args:
      count: number of rows of the batch, a multiple of `algorithm.minibatches`.
      algorithm: numbers of epochs and minibatches.
      seed: non-negative numbers that seed the order.
      update: number of the update within the batch, from 0.
    """
    epoch, place = divmod(update, algorithm.minibatches)
    order = np.random.default_rng([seed[0], _ORDER, *seed[1:], epoch]).permutation(count)
    return np.sort(order.reshape(algorithm.minibatches, -1)[place]).astype(np.int64)


def mean_kl(batch: Batch, logprobs: np.ndarray, old_logprobs: np.ndarray) -> float:
    """Estimates KL(old || new) over the sampled tokens of a batch by k3, in float64; 0 without tokens.

    Source: Schulman, Approximating KL divergence, 2020.
    """
    drawn = batch["targets"] != IGNORED_TARGET
    log_ratio = (logprobs.astype(np.float64) - old_logprobs)[drawn]
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if drawn.any() else 0.0


def check_minibatches(rows: int, algorithm: PolicyConfig) -> None:
    """Raises a ConfigError if the minibatches do not divide the episodes of a batch."""
    if rows % algorithm.minibatches:
        divisors = ", ".join(str(each) for each in range(1, rows + 1) if rows % each == 0)
        raise ConfigError(
            f"objective.minibatches is {algorithm.minibatches}, which does not divide the {rows} episodes of a batch "
            f"(data.groups * data.group_size). Set it to one of {divisors}, or change the number of episodes."
        )
