"""Data that depends on the weights of the run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stack_core.abi.data import Batch, Batches

if TYPE_CHECKING:
    from stack_core.abi.formats import GenerativeCheckpoint

__all__ = ["PolicyBatches"]


class PolicyBatches(Batches):
    """Data that depends on the weights: rollouts of the policy, or scores by the initial weights."""

    @property
    def takes_trained(self) -> bool:
        """Whether `update_weights` takes the trained parameters only, such as an adapter, without the frozen ones."""
        return False

    def take_policy(self, open_policy: Callable[[], GenerativeCheckpoint]) -> None:
        """Prepares generation with the run's own model. Called once, before the first `update_weights`.

        Args:
          open_policy: returns the model, whose `load_params` copies the weights at the time of the call. With several
            processes, `load_params` is a collective that gathers the weights in each of them.

        Raises:
          StackError: the model cannot generate.
        """

    @abstractmethod
    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        """Takes the weights for later batches. Called before the first step and after each step.

        Args:
          params: variables of the model; valid until the next step begins, which donates them. With several processes
            they are sharded over all of them (`stack_core.runtime.gathering.gathered`).
          version: number of completed steps.
          score: `score(params, batch)` returns host arrays, see `Trainer.score`.
        """
