"""Formats of models on disk: what opens a directory, and what it opens it as."""

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
    "ExportsAdapters",
    "ExportsRuns",
    "ExportsStored",
    "GenerativeCheckpoint",
    "IgnoresKeys",
    "ImportsAdapters",
    "ImportsRuns",
    "ModelFormat",
    "OpensForGeneration",
    "OpensFurtherModels",
    "OpensModels",
    "Progress",
    "StartingPoint",
    "StartsRuns",
    "TrainedModel",
]


Progress = Callable[[str, int, int], None]
"""Receives the parameter that was just converted, how many bytes are done, and how many there are."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote.

    Attributes:
      kept: the names of the files that were copied as they were, a tokenizer's among them.
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
    """A format of models on disk; what it can do with a directory are protocols of their own, below."""

    def recognizes(self, directory: Path) -> bool:
        """Whether a directory looks like one of this format; reads little, and raises nothing."""
        ...


@runtime_checkable
class OpensForGeneration(ModelFormat, Protocol):
    """A format whose language models generate text."""

    def open_for_generation(self, directory: Path) -> GenerativeCheckpoint:
        """Opens a language model to generate text.

        Raises:
          StackError: the checkpoint cannot be used.
        """
        ...


@runtime_checkable
class OpensFurtherModels(ModelFormat, Protocol):
    """A format that keeps what an objective trained beside the model, such as the head of a reward model."""

    def open_further(self, directory: Path, name: str, abstract: Any) -> Any:
        """Reads the parameters of a further model.

        Args:
          name: of `TrainsModels.trained_models`.
          abstract: shapes and dtypes of its parameters, nested dicts of `jax.ShapeDtypeStruct`.

        Returns:
          Arrays in the structure of `abstract`, on the default device.

        Raises:
          StackError: no such model was trained, or its parameters are others.
        """
        ...


@runtime_checkable
class OpensModels(ModelFormat, Protocol):
    """A format whose models other packages may change, measure and save."""

    def open_model(self, directory: Path, *, data: str | None) -> TrainedModel:
        """Opens a trained model with the data that it is measured on.

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
        """Makes a run directory of a checkpoint, which training and generation start from; whole or not at all."""
        ...


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint that a run starts from.

    Attributes:
      config: of the model.
      leaves: reads the parameters one by one, each with its path; its parts are joined by "/".
      tokenizer: directory of the tokenizer, if the checkpoint has one.
      configs: directory of the `config.json` and `generation_config.json` that it came with.
    """

    config: Any
    leaves: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer: Path | None
    configs: Path


@runtime_checkable
class StartsRuns(ModelFormat, Protocol):
    """A format that training starts from: `run.init_from: FORMAT:DIR`."""

    def open_start(self, directory: Path) -> StartingPoint:
        """Opens a checkpoint without reading its values.

        Raises:
          StackError: it cannot be used.
        """
        ...


@runtime_checkable
class IgnoresKeys(ModelFormat, Protocol):
    """A format whose checkpoints have a config, of which an unknown key stops an import unless it is ignored.

    Attributes:
      config_file: the config's name.
    """

    config_file: str

    def import_run(
        self, directory: Path, run: Path, *, ignore: Collection[str] = (), progress: Progress | None = None
    ) -> Conversion:
        """As `ImportsRuns.import_run`; the config is read as if it did not have the keys of `ignore`."""
        ...


@runtime_checkable
class ImportsAdapters(ModelFormat, Protocol):
    """A format of adapters, whose `import_run` takes the base that they are for."""

    def read_adapters(self, directory: Path, config: Any, digests: Callable[[], Any]) -> Adapters:
        """Reads the adapters for a model of this config.

        Args:
          digests: gives the shapes, dtypes and digests of the model's leaves, by path.
        """
        ...

    def import_run(
        self, directory: Path, run: Path, *, progress: Progress | None = None, base: Path | None = None
    ) -> Conversion:
        """As `ImportsRuns.import_run`, of adapters and their base; None is the base that the adapters name."""
        ...


@runtime_checkable
class ExportsRuns(ModelFormat, Protocol):
    """A format that `stack convert RUN FORMAT:DIR` writes."""

    def export_run(self, run: Path, directory: Path, *, progress: Progress | None = None) -> Conversion:
        """Makes a checkpoint of a run's newest one; whole or not at all, and overwrites nothing."""
        ...


@runtime_checkable
class ExportsAdapters(ModelFormat, Protocol):
    """A format of adapters that names their base.

    Attributes:
      base_key: where it is written.
    """

    base_key: str

    def export_run(
        self, run: Path, directory: Path, *, base_model: str | None = None, progress: Progress | None = None
    ) -> Conversion:
        """As `ExportsRuns.export_run`, of a run's adapters; None names the run that holds their base."""
        ...


@runtime_checkable
class ExportsStored(ModelFormat, Protocol):
    """A format that stores matrices in one of several types.

    Attributes:
      stored_types: their names; the first is the default.
    """

    stored_types: tuple[str, ...]

    def export_run(
        self, run: Path, directory: Path, *, stored: str | None = None, progress: Progress | None = None
    ) -> Conversion:
        """As `ExportsRuns.export_run`, with matrices stored as one of `stored_types`."""
        ...


@runtime_checkable
class GenerativeCheckpoint(Protocol):
    """A language model as a checkpoint format opens it to generate text.

    Attributes:
      name: for people, and for clients that ask which model they talk to.
      parameters: shapes and dtypes of its parameters, a pytree of `jax.ShapeDtypeStruct`; none are read for it.
      states: what its layers keep of a sequence, as `LanguageModel.states`.
      vocab_size: tokens that it has logits for.
      max_positions: tokens of the longest sequence.
      tokenizer: its own, or None.
      end_tokens: tokens that end a text.
      chat_template: Jinja source that turns messages into a prompt, or None.
      special_tokens: texts that the template may name, such as `bos_token`.
      sampling_defaults: fields of `SamplingParams` that the model's makers recommend.
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

        They are the caller's alone, so that memory holds them once; another call reads them again.

        Args:
          shardings: where each is to lie, as `shardings` has them, each device getting its own part alone; None puts
            all on the default device.

        Raises:
          StackError: they cannot be read.
        """
        ...

    def model(self, params: Any) -> LanguageModel:
        """The model with these parameters, in the structure of `parameters`; called while JAX traces."""
        ...

    def shardings(self, mesh: Any) -> Any:
        """How the parameters lie on a mesh, in their structure; a quantized array's sharding is a tree, too."""
        ...


@runtime_checkable
class TrainedModel(Protocol):
    """A trained model and the data that it is measured on, as a checkpoint format opens them in a directory.

    Attributes:
      model: with its parameters, in float.
      sections: registered configs by name, of the run that it is from.
    """

    model: Any

    @property
    def sections(self) -> Mapping[str, Any]: ...

    def training_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches of the data that it was trained on, without end."""
        ...

    def validation_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches that were held out, the same at each call; none where nothing was."""
        ...

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Metrics:
        """Pure: the metrics of its objective, "loss" among them, for this or another such model."""
        ...

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        """Writes a run directory with `model` in the place of this one, whole or not at all; overwrites nothing.

        Args:
          sections: what the run's config has besides, a registered config by the section's name.
        """
        ...
