"""Formats of models on disk: protocols of their abilities, and the results of opening a directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from stack_core.abi.adapters import Adapters
    from stack_core.abi.data import Tokenizer
    from stack_core.abi.metrics import Metrics
    from stack_core.abi.models import LanguageModel

__all__ = [
    "Conversion",
    "Dequantizes",
    "ExportsAdapters",
    "ExportsByImportance",
    "ExportsRuns",
    "ExportsStored",
    "GenerativeCheckpoint",
    "IgnoresKeys",
    "ImportsAdapters",
    "ImportsRuns",
    "ModelFormat",
    "OpensAuxiliaryModels",
    "OpensForGeneration",
    "OpensModels",
    "Progress",
    "StartingPoint",
    "StartsRuns",
    "TrainedModel",
]


Progress = Callable[[str, int, int], None]
"""Callback with the path of the parameter just converted, the bytes done so far, and the total bytes."""


@dataclass(frozen=True)
class Conversion:
    """Summary of a finished conversion.

    Attributes:
      destination: path of the result.
      parameters: number of parameters.
      size_bytes: size of the parameters.
      dtype: dtype of the parameters.
      kept: names of files copied unchanged, such as a tokenizer's.
      left_out: parts of the source that were not converted, for people: "vision_tower (437 tensors)".
    """

    destination: Path
    parameters: int
    size_bytes: int
    dtype: str
    kept: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@runtime_checkable
class ModelFormat(Protocol):
    """A format of models on disk; its abilities are the separate protocols below."""

    def recognizes(self, directory: Path) -> bool:
        """Returns whether a directory looks like this format; reads little and never raises."""
        ...


@runtime_checkable
class OpensForGeneration(ModelFormat, Protocol):
    """A format whose language models generate text."""

    def open_for_generation(self, directory: Path) -> GenerativeCheckpoint:
        """Opens a language model for text generation.

        Raises:
          StackError: the checkpoint cannot be used.
        """
        ...


@runtime_checkable
class OpensAuxiliaryModels(ModelFormat, Protocol):
    """A format that stores an objective's auxiliary models, such as the head of a reward model."""

    def open_auxiliary(self, directory: Path, name: str, abstract: Any) -> Any:
        """Reads the parameters of an auxiliary model.

        Args:
          name: its name in `Objective.auxiliary_models`.
          abstract: shapes and dtypes of its parameters, nested dicts of `jax.ShapeDtypeStruct`.

        Returns:
          Arrays in the structure of `abstract`, on the default device.

        Raises:
          StackError: no such model was trained, or its parameters differ from `abstract`.
        """
        ...


@runtime_checkable
class OpensModels(ModelFormat, Protocol):
    """A format whose models other packages may modify, evaluate and save."""

    def open_model(self, directory: Path, *, data: str | None) -> TrainedModel:
        """Opens a trained model with its evaluation data.

        Args:
          data: address of other documents than the model's own.

        Raises:
          StackError: the checkpoint or the data cannot be used.
        """
        ...


@runtime_checkable
class ImportsRuns(ModelFormat, Protocol):
    """A format that `stack convert FORMAT:DIR RUN` reads."""

    def import_run(self, directory: Path, run: Path, *, progress: Progress | None = None) -> Conversion:
        """Converts a checkpoint to a run directory for training and generation; a failure leaves no files behind."""
        ...


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint with which a run starts.

    Attributes:
      config: config of the model.
      leaves: returns an iterator over (path, parameter), where the path's segments are joined by "/".
      tokenizer: directory of the tokenizer, or None.
      configs: directory of the checkpoint's `config.json` and `generation_config.json`.
    """

    config: Any
    leaves: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer: Path | None
    configs: Path


@runtime_checkable
class StartsRuns(ModelFormat, Protocol):
    """A format with which training starts: `run.init_from: FORMAT:DIR`."""

    def open_start(self, directory: Path) -> StartingPoint:
        """Opens a checkpoint without reading its values.

        Raises:
          StackError: the checkpoint cannot be used.
        """
        ...


@runtime_checkable
class IgnoresKeys(ModelFormat, Protocol):
    """A format with a config file whose unknown keys fail an import unless they are ignored.

    Attributes:
      config_file: name of the config file.
    """

    config_file: str

    def import_run(
        self, directory: Path, run: Path, *, ignore: Collection[str] = (), progress: Progress | None = None
    ) -> Conversion:
        """Imports as `ImportsRuns.import_run` does, reading the config without the keys in `ignore`."""
        ...


@runtime_checkable
class ImportsAdapters(ModelFormat, Protocol):
    """A format of adapters, whose `import_run` also takes their base model."""

    def read_adapters(self, directory: Path, config: Any, digests: Callable[[], Any]) -> Adapters:
        """Reads the adapters for a model with this config.

        Args:
          digests: returns the shapes, dtypes and digests of the model's leaves, by path.
        """
        ...

    def import_run(
        self, directory: Path, run: Path, *, progress: Progress | None = None, base: Path | None = None
    ) -> Conversion:
        """Imports adapters and their base, as `ImportsRuns.import_run`; None is the base that the adapters name."""
        ...


@runtime_checkable
class ExportsRuns(ModelFormat, Protocol):
    """A format that `stack convert RUN FORMAT:DIR` writes."""

    def export_run(self, run: Path, directory: Path, *, progress: Progress | None = None) -> Conversion:
        """Converts a run's newest checkpoint; overwrites no existing files and leaves none behind after a failure."""
        ...


@runtime_checkable
class ExportsAdapters(ModelFormat, Protocol):
    """A format of adapters that records the name of their base.

    Attributes:
      base_key: key of the base's name in the adapter's config.
    """

    base_key: str

    def export_run(
        self, run: Path, directory: Path, *, base_model: str | None = None, progress: Progress | None = None
    ) -> Conversion:
        """Exports a run's adapters, as `ExportsRuns.export_run`; None names the run that holds their base."""
        ...


@runtime_checkable
class ExportsStored(ModelFormat, Protocol):
    """A format that stores matrices in one of several types.

    Attributes:
      stored_types: names of the types; the first is the default.
    """

    stored_types: tuple[str, ...]

    def export_run(
        self, run: Path, directory: Path, *, stored: str | None = None, progress: Progress | None = None
    ) -> Conversion:
        """Exports as `ExportsRuns.export_run` does, with matrices stored as one of `stored_types`."""
        ...


@runtime_checkable
class ExportsByImportance(ExportsStored, Protocol):
    """A format whose quantized types fit the important columns of matrices better; marked by `fits_importance`."""

    fits_importance: bool

    def export_run(
        self, run: Path, directory: Path, *, stored: str | None = None, importance: Path | None = None,
        progress: Progress | None = None,
    ) -> Conversion:  # fmt: skip
        """Exports as `ExportsStored.export_run` does; `importance` is the file of the mean squared inputs."""
        ...


@runtime_checkable
class GenerativeCheckpoint(Protocol):
    """A language model opened by a checkpoint format for text generation.

    An engine in another process receives it pickled, without its parameters, which are sent separately.

    Attributes:
      name: name for people, and for clients that query the served model.
      parameters: shapes and dtypes of its parameters, a pytree of `jax.ShapeDtypeStruct`, available without reading
        them.
      states: state of its layers per sequence, as in `LanguageModel.states`.
      vocab_size: number of tokens with logits.
      max_positions: maximum sequence length in tokens.
      tokenizer: tokenizer of the model, or None.
      end_tokens: token ids that end a text.
      chat_template: Jinja source that converts messages to a prompt, or None.
      special_tokens: texts available to the template, such as `bos_token`.
      sampling_defaults: fields of `SamplingParams` recommended by the model's authors.
    """

    name: str
    parameters: Any
    states: Any
    vocab_size: int
    max_positions: int
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]
    chat_template: str | None
    special_tokens: Mapping[str, str]
    sampling_defaults: Mapping[str, Any]

    def load_params(self, shardings: Any = None) -> Any:
        """Reads the parameters, in the structure, shapes and dtypes of `parameters`; some may be quantized arrays.

        The caller owns the arrays, and memory holds them once; another call reads them again.

        Args:
          shardings: target sharding of each parameter, as returned by `shardings`; each device reads only its own
            shards. None places all on the default device.

        Raises:
          StackError: the parameters cannot be read.
        """
        ...

    def model(self, params: Any) -> LanguageModel:
        """Returns the model with these parameters, in the structure of `parameters`; called while JAX traces."""
        ...

    def shardings(self, mesh: Any) -> Any:
        """Returns the shardings of the parameters on a mesh, in the structure of the parameters.

        For a quantized array it is a pytree of shardings.
        """
        ...


@runtime_checkable
class Dequantizes(Protocol):
    """A `GenerativeCheckpoint` whose quantized weights may be read in floating point instead."""

    def dequantized(self) -> GenerativeCheckpoint:
        """Returns the checkpoint in floating point; raises a StackError if it is not stored in such a format."""
        ...


@runtime_checkable
class TrainedModel(Protocol):
    """A trained model and its evaluation data, opened by a checkpoint format.

    Attributes:
      model: the model with its parameters, in floating point.
      sections: registered configs of the model's run, by section name.
    """

    model: Any

    @property
    def sections(self) -> Mapping[str, Any]: ...

    def training_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields batches of its training data, endlessly."""
        ...

    def validation_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields the validation batches, identical at each call; an empty iterator if there is no validation split."""
        ...

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Metrics:
        """Computes the metrics of its objective, including "loss" (pure).

        Args:
          model: this model, or another one with the same interface.
        """
        ...

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        """Writes a run directory that contains `model` instead of this one, atomically; never overwrites.

        Args:
          sections: additional sections of the run's config, registered configs by section name.
        """
        ...
