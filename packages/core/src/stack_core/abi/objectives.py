"""Objectives: pure loss functions of a model and a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import jax

    from stack_core.abi.metrics import Metrics
    from stack_core.abi.models import Outputs

__all__ = ["Objective"]


class Objective(ABC):
    """A pure loss function of a model and a batch. Only the call is required.

    Batch entries that only the host needs are removed before the call.

    Attributes:
      inputs: axis names of each batch array that the objective reads, such as "batch seq"; axes with equal names have
        equal sizes, and `*name` is any number of axes. The data is checked against them before anything is traced.
      notes: lines to print at the start of a run, such as how an algorithm departs from its paper.
      shown_metrics: names of its metrics to display after the loss, in this order, for instance because the loss of a
        policy gradient is hard to interpret. Names without a metric in a batch are skipped.
      rate_metrics: names of metrics that are amounts of a step, to display per second after `shown_metrics`.
      auxiliary_models: other models that the objective calls, passed as keyword arguments by name. A string is the
        source of a frozen model: "init", the trained model before the first step, "average", its averaged weights, or
        "run:DIRECTORY". A function `build(model_config, *, key)` returns a new model that is trained, an `nnx.Module`
        of `nnx.Param`s only; parameters to be split over a mesh have the metadata `logical_axes`.
    """

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType({})
    shown_metrics: ClassVar[tuple[str, ...]] = ()
    rate_metrics: ClassVar[tuple[str, ...]] = ()

    @property
    def notes(self) -> Sequence[str]:
        return ()

    @property
    def auxiliary_models(self) -> Mapping[str, str | Callable[..., Any]]:
        return MappingProxyType({})

    def build(self) -> Objective:
        """Returns the objective of a run; a config that is itself the objective inherits this."""
        return self

    @abstractmethod
    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        """Returns (scalar loss, metrics).

        The metrics include "loss", a `Metric.mean` whose weight is the denominator of the loss. Losses and gradients of
        microbatches are combined by this weight.
        """

    def scores(
        self, model: Any, outputs: Outputs, batch: Mapping[str, jax.Array], **auxiliary: Any
    ) -> Mapping[str, jax.Array]:
        """Computes values per token besides log-probabilities, such as a critic's, as float32[batch, seq] (pure).

        Args:
          model: the trained model.
          outputs: outputs of the model for the batch.
          auxiliary: the auxiliary models, by name.
        """
        return {}
