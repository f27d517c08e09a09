"""Training: objectives, trainers, model transforms, and observers of a run."""

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
    """A pure loss function of a model and a batch.

    Batch entries that only the host needs are removed before the call. The small protocols below describe optional
    capabilities, checked by `isinstance`.
    """

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        """Returns (scalar loss, metrics).

        The metrics include "loss", a `Metric.mean` whose weight is the denominator of the loss. Losses and gradients of
        microbatches are combined by this weight.
        """
        ...


@runtime_checkable
class ReadsInputs(Protocol):
    """An objective that declares the batch arrays it reads; the data is checked against them before anything is traced.

    Attributes:
      inputs: axis names of each array, such as "batch seq"; axes with equal names have equal sizes.
    """

    @property
    def inputs(self) -> Mapping[str, str]: ...


@runtime_checkable
class NeedsCompanions(Protocol):
    """An objective that uses frozen models in addition to the trained one, passed as keyword arguments by name.

    Attributes:
      companions: source of each model: "init", the trained model before the first step, or "run:DIRECTORY".
    """

    @property
    def companions(self) -> Mapping[str, str]: ...


@runtime_checkable
class TrainsModels(Protocol):
    """An objective that trains auxiliary models such as a critic, passed as keyword arguments by name.

    Attributes:
      trained_models: constructor of each, `build(model_config, *, key)`, which returns an `nnx.Module` whose variables
        are all `nnx.Param`. Parameters to be split over a mesh have the metadata `logical_axes`.
    """

    @property
    def trained_models(self) -> Mapping[str, Callable[..., Any]]: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An objective that computes other values per token than log-probabilities, such as a critic's values."""

    def scores(self, outputs: Outputs, batch: Mapping[str, jax.Array], **models: Any) -> Mapping[str, jax.Array]:
        """Computes float32[batch, seq] arrays by name, which `Trainer.score` returns along with its own (pure).

        Args:
          outputs: outputs of the trained model for the batch.
          models: the objective's auxiliary models, by name.
        """
        ...


@runtime_checkable
class ShowsMetrics(Protocol):
    """An objective that selects the metrics to display.

    It is useful when the loss is hard to interpret, as a policy gradient's.

    Attributes:
      shown_metrics: names of its metrics in the order of display, after the loss. Names without a metric in a batch are
        skipped.
    """

    @property
    def shown_metrics(self) -> tuple[str, ...]: ...


@runtime_checkable
class Trainer(Protocol):
    """A state machine over a pytree; its owner runs the loop and writes the checkpoints."""

    def init(self, *, key: jax.Array) -> Any:
        """Returns the state before the first step."""
        ...

    def step(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Metrics]:
        """Computes the next state and the metrics (pure); bitwise equal to `update` after `gradients`.

        The owner compiles it with the state donated.
        """
        ...

    def gradients(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Metrics, Any]:
        """Computes the gradients of one batch, the metrics, and the variables that the forward pass updated (pure)."""
        ...

    def update(self, state: Any, gradients: Any, moved: Any) -> tuple[Any, Metrics]:
        """Applies gradients and updated variables; returns the next state and the metrics of the update (pure)."""
        ...

    def score(self, variables: Any, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Scores the targets of a batch with a language model, without gradients (pure).

        Args:
          batch: tokens, targets, positions and segment_ids, int32[batch, seq]; -100 marks positions without a target.

        Returns:
          float32[batch, seq] arrays: "logprobs", log p(target), 0 at positions without a target; "entropy" of the
          predicted distribution; "values", if the model's outputs have that entry; and the arrays of an objective that
          `ScoresTokens`.
        """
        ...


@runtime_checkable
class ModelTransform(Protocol):
    """A transform that replaces a model by another, quantized or with adapters; several apply in order."""

    def apply(self, model: Any) -> Any:
        """Returns the transformed model; `model` stays unchanged.

        Args:
          model: a model with values, or an abstract one from `jax.eval_shape`, which gives an abstract result.
        """
        ...

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes `function(model, *args, **kwargs)` for a model that `apply` returned, as one program.

        The transform also covers computations that the function composes from several methods of the model, as a loss
        does.
        """
        ...

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        """Returns whether a run trains a variable of the transformed model.

        Args:
          path: keys from the model to the variable.
          variable: an `nnx.Variable` that a run without the transform would train.
        """
        ...


@runtime_checkable
class MergesModel(Protocol):
    """A transform that can fold its changes back into the original model structure, as adapters are merged."""

    def merged(self, model: Any) -> Any:
        """Returns a model without the parts that `apply` added; it computes the same function up to rounding.

        Args:
          model: a model with values that `apply` returned; it stays unchanged.
        """
        ...


TransformFactory = Callable[[Any, Mapping[str, Any]], ModelTransform]
"""Entry of the registry `transforms`: builds a transform from a section's config and a sample batch (or its shapes)."""


@runtime_checkable
class Observer(Protocol):
    """A receiver of all events of a run, on the host and in order."""

    def observe(self, event: Event) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ObservesInLoop(Observer, Protocol):
    """An observer that the training loop calls between its steps, for instance to start a trace or read a clock.

    Its calls have no time limit: they must not wait for a disk, a network or a terminal.
    """

    @property
    def in_loop(self) -> Literal[True]: ...
