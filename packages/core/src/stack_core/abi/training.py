"""Training: objectives, trainers, transforms of models, and the observers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

    from stack_core.abi.events import Event
    from stack_core.abi.metrics import Metrics
    from stack_core.abi.models import Outputs

__all__ = [
    "MergesModel",
    "ModelTransform",
    "NeedsCompanions",
    "Objective",
    "Observer",
    "ObservesInLoop",
    "ReadsInputs",
    "ScoresTokens",
    "ShowsMetrics",
    "Trainer",
    "TrainsModels",
    "TransformFactory",
]


@runtime_checkable
class Objective(Protocol):
    """A pure loss; host-side batch entries that the device does not need are gone by then.

    What else objectives can say are the small protocols below, asked by `isinstance`.
    """

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        """Returns (scalar loss, metrics).

        Among the metrics is "loss", a `Metric.mean` whose weight is what the loss was averaged over: losses and
        gradients of microbatches are added up by it.
        """
        ...


@runtime_checkable
class ReadsInputs(Protocol):
    """An objective that says what it reads of a batch, which is compared with the data before anything is traced.

    Attributes:
      inputs: the names of the axes of each array, such as "batch seq"; axes of one name have one size.
    """

    @property
    def inputs(self) -> Mapping[str, str]: ...


@runtime_checkable
class NeedsCompanions(Protocol):
    """An objective that asks frozen models beside the trained one, which it is called with by their names.

    Attributes:
      companions: where each comes from: "init", the trained model as it was at the start, or "run:DIRECTORY".
    """

    @property
    def companions(self) -> Mapping[str, str]: ...


@runtime_checkable
class TrainsModels(Protocol):
    """An objective that trains further models beside the run's, which it is called with by their names: a critic.

    Attributes:
      trained_models: what makes each, `build(model_config, *, key)`: an `nnx.Module` of which every variable is an
        `nnx.Param`, with the metadata `logical_axes` where it is to be split over a mesh.
    """

    @property
    def trained_models(self) -> Mapping[str, Callable[..., Any]]: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An objective that says more of a batch's tokens than their log-probabilities, such as a critic's values."""

    def scores(self, outputs: Outputs, batch: Mapping[str, jax.Array], **models: Any) -> Mapping[str, jax.Array]:
        """Pure: float32[batch, seq] arrays by name, which `Trainer.score` gives along with its own.

        Args:
          outputs: of the model that is trained, for the batch.
          models: the further models that the objective trains, by their names.
        """
        ...


@runtime_checkable
class ShowsMetrics(Protocol):
    """An objective that selects metrics to follow a run by, for losses that say little, such as a policy gradient's.

    Attributes:
      shown_metrics: names of its metrics in the order of display, after the loss. Names that a batch gives no metric of
        are left out.
    """

    @property
    def shown_metrics(self) -> tuple[str, ...]: ...


@runtime_checkable
class Trainer(Protocol):
    """A state machine over a pytree; the loop around it and the checkpoints of its state belong to others."""

    def init(self, *, key: jax.Array) -> Any:
        """Returns the state before the first step."""
        ...

    def step(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Metrics]:
        """Pure: the next state and metrics, those of `update` after `gradients`, bit for bit.

        Its owner compiles it with the state donated.
        """
        ...

    def gradients(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Metrics, Any]:
        """Pure: the gradients of one batch, metrics, and the variables that the forward pass moved."""
        ...

    def update(self, state: Any, gradients: Any, moved: Any) -> tuple[Any, Metrics]:
        """Pure: the next state by gradients and moved variables, and metrics of the update."""
        ...

    def score(self, variables: Any, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Pure: what a language model gives the targets of a batch, without gradients.

        Args:
          batch: tokens, targets, positions and segment_ids, int32[batch, seq]; -100 is no target.

        Returns:
          float32[batch, seq]: "logprobs", log p(target), 0 where there is none; "entropy" of the distribution that the
          target was to be drawn from; "values", where the model's outputs have that fact; and what an objective that
          `ScoresTokens` gives.
        """
        ...


@runtime_checkable
class ModelTransform(Protocol):
    """Puts another model in the place of a model: quantized, or with adapters; several apply in order."""

    def apply(self, model: Any) -> Any:
        """Returns the other model; `model` stays as it is.

        Args:
          model: with values, or abstract as `jax.eval_shape` gives it; the result is abstract, too, then.
        """
        ...

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """`function(model, *args, **kwargs)` of a model that `apply` gave, as one program.

        What the function computes from several of the model's methods, as a loss does, is transformed, too.
        """
        ...

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Whether a run trains a variable of the other model.

        Args:
          path: keys from the model to the variable.
          variable: an `nnx.Variable` that a run without the transform would train.
        """
        ...


@runtime_checkable
class MergesModel(Protocol):
    """A transform whose models can be turned back into ones that it would apply to, as adapters are merged."""

    def merged(self, model: Any) -> Any:
        """Returns a model without what `apply` added, that computes what the given one computes up to rounding.

        Args:
          model: one with values, that `apply` gave; it stays as it is.
        """
        ...


TransformFactory = Callable[[Any, Mapping[str, Any]], ModelTransform]
"""What the registry `transforms` holds: makes one of a section's config and a sample batch, arrays or their shapes."""


@runtime_checkable
class Observer(Protocol):
    """Receives every event of a run on the host, in order."""

    def observe(self, event: Event) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ObservesInLoop(Observer, Protocol):
    """An observer that the training loop calls between its steps, such as one that starts a trace or reads a clock.

    Nothing limits how long such a call takes: it must not wait for a disk, a network or a terminal.
    """

    @property
    def in_loop(self) -> Literal[True]: ...
