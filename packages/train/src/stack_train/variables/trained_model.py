"""Trained models with their data and objective, for packages that derive other models, such as quantized ones."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stack_core.abi.config import to_yaml
from stack_core.abi.data import Batches
from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Conversion, Progress
from stack_core.abi.metrics import Metrics
from stack_core.abi.objectives import Objective
from stack_core.abi.policy import PolicyBatches
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.atomic_directory import atomic_directory
from stack_core.text.image_models import ImageModel
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.kinds.preferences import AnswersData, PreferenceBatches
from stack_train.data.kinds.text import TextData
from stack_train.diffusion.objectives import Denoises
from stack_train.generation.generative import ModuleCheckpoint, generative_checkpoint, parameters_of
from stack_train.models.decoder import Decoder
from stack_train.objectives import CausalLMConfig, as_objective
from stack_train.optim.optax_optimizer import as_optimizer
from stack_train.run.config import RunConfig, batches_of, run_config
from stack_train.run.model import abstract_model, holds_codes, stored_model
from stack_train.run.resolve import with_tokenizer
from stack_train.run.transforms import transform_names, transform_of
from stack_train.step.auxiliary import trained_model
from stack_train.step.state import AuxiliaryState
from stack_train.variables.adapters import read_adapters
from stack_train.variables.model_variables import ModelVariables, stored_values
from stack_train.variables.trained_adapters import digests_of_run
from stack_train.variables.weights import read_model, read_params

__all__ = ["RUN_FORMAT", "RunFormat", "TrainedLanguageModel"]

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainedLanguageModel:
    """A `TrainedModel` that was read from a run or converted from another format.

    Attributes:
      model: the `nnx.Module` with its trained parameters.
      config: config of the run that trained the model, or an equivalent one if the model was converted.
      tokenizer: directory of the tokenizer used in training.
      step: number of training steps done.
      copy_files: function that copies the tokenizer and other accompanying files to a run directory.
      directory: directory of the run, which may have scores of its data; None for other formats.
      measured: config whose data and objective measure the model instead of its own; None for its own.
    """

    model: Any
    config: RunConfig
    tokenizer: Path
    step: int
    copy_files: Callable[[RunDirectory], object]
    directory: Path | None = None
    measured: RunConfig | None = None

    @property
    def sections(self) -> Mapping[str, Any]:
        return self.config.sections

    def training_batches(self) -> Iterator[Batch]:
        batches = map(_for_the_device, self._data.train_iterator())
        return map(_in_rows, batches) if isinstance(self._data, PreferenceBatches) else batches

    def validation_batches(self) -> Iterator[Batch]:
        return map(_for_the_device, self._data.validation_batches())

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Metrics:
        objective = self._objective
        if names := ", ".join(objective.auxiliary_models):
            raise ConversionError(
                f"Objective {self._measuring.objective.name!r} calls auxiliary models ({names}), which are not loaded "
                "here. Open a run of another objective, such as causal_lm."
            )
        return objective(model, batch, key=jax.random.key(0))[1]

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        architecture = self.config.model
        if isinstance(model, Decoder):  # its head may have been untied
            architecture = replace(architecture, tie_embeddings=model.config.tie_embeddings)
        config = replace(
            self.config,
            model=architecture,
            # The final directory, because the config is read after `atomic_directory` renames the temporary one.
            output=str(directory),
            data=with_tokenizer(self.config.data, directory / "tokenizer"),
            sections={**self.config.sections, **sections},
        )
        with atomic_directory(directory) as partial:
            run = RunDirectory(partial)
            self.copy_files(run)
            leaves = named_leaves(stored_values(model))
            with CheckpointStore(run.checkpoints) as store:
                store.save_weights(leaves.items(), to_yaml(config), step=self.step)
            run.config.write_text(to_yaml(config), encoding="utf-8")

    @cached_property
    def _data(self) -> Batches:
        config = self._measuring
        data = with_tokenizer(config.data, self.tokenizer)
        batches = batches_of(data, config.objective).build(seed=config.run.seed, model=config.model)
        if isinstance(batches, PreferenceBatches) and self.directory is not None:
            batches.read_scores(self.directory)
        elif isinstance(batches, PolicyBatches):
            raise ConversionError(
                f"Data of kind {data.name!r} are made by the policy in training, and cannot be read again. Give "
                "documents in their place: --data SOURCE, such as --data text:notes/*.txt."
            )
        return batches

    @cached_property
    def _objective(self) -> Objective:
        return as_objective(self._measuring.objective.build())

    @property
    def _measuring(self) -> RunConfig:
        return self.measured or self.config


class RunFormat:
    """The model format of run directories, written by `stack train` and read by `stack generate`."""

    def recognizes(self, directory: Path) -> bool:
        return RunDirectory(directory).config.is_file()

    def open_model(self, directory: Path, *, data: str | None = None) -> TrainedLanguageModel:
        """Opens the newest intact checkpoint of a run in floating point, with adapters merged.

        Args:
          data: address of the documents to use instead of the run's; None for the run's. Preferences and rollouts are
            replaced by texts, with the loss of a language model.

        Raises:
          ConversionError: the run's checkpoints hold quantized parameters.
          RunDirectoryError: `directory` is not a run directory.
          CheckpointError: the run does not have an intact checkpoint.
        """
        config = run_config(directory)
        if holds_codes(config):
            raise ConversionError(
                f"The parameters of {directory} are quantized already, by section "
                f"{' and '.join(transform_names(config))} of its config. Give the run that it was quantized from."
            )
        measured = None if data is None else _on_documents(config, data, directory)
        run = RunDirectory(directory)

        def copy_files(destination: RunDirectory) -> None:
            for name in ("tokenizer", "huggingface"):
                if (run.path / name).is_dir():
                    shutil.copytree(run.path / name, destination.path / name)

        params, step = read_params(directory, config.model)
        model = ModelVariables.of(abstract_model(config.model)).merge(params)
        if transform_of(config).merges:  # The merged adapters are now part of the matrices, so their section goes.
            others = {name: section for name, section in config.sections.items() if name not in transform_names(config)}
            config = replace(config, sections=others)
        return TrainedLanguageModel(model, config, run.tokenizer, step, copy_files, directory, measured)

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a run for generation, quantized if its parameters are stored quantized.

        The newest intact checkpoint is read when the parameters are loaded.

        Raises:
          RunDirectoryError: `directory` is not a run directory.
          GenerationError: the model cannot generate text, or does not match the tokenizer.
          DataError: the tokenizer is malformed.
        """
        run, config = RunDirectory(directory), run_config(directory)
        return generative_checkpoint(
            stored_model(config),
            config.model,
            read=lambda shardings: parameters_of(read_model(directory, config, shardings)[0]),
            adapters_at=lambda address: read_adapters(address, config.model, lambda: digests_of_run(directory)),
            name=directory.resolve().name,
            tokenizer=run.tokenizer,
            origin=directory / "huggingface",
        )

    def has_image_model(self, directory: Path) -> bool:
        """Returns whether a run trains a denoiser."""
        return isinstance(run_config(directory).objective, Denoises)

    def open_image_model(self, directory: Path) -> ImageModel:
        """Opens the newest intact checkpoint of a denoiser; averaged weights take precedence.

        Raises:
          StackError: see `stack_train.diffusion.sampling.open_run`.
        """
        # Imported here, because runs of language models do not need these modules.
        from stack_train.diffusion.image_model import DiffusionModel
        from stack_train.diffusion.sampling import open_run

        return DiffusionModel(open_run(directory), directory.resolve().name)

    def export_run(self, run: Path, directory: Path, *, progress: Progress | None = None) -> Conversion:
        """Writes a run directory with the run's adapters merged into its base: `stack convert RUN run:DIR`.

        Raises:
          ConversionError: the run does not train adapters, `directory` exists, or `open_model` fails.
        """
        if transform_of(run_config(run)).adapting is None:
            raise ConversionError(f"The run {run} has no adapters to merge. Copy its directory instead.")
        opened = self.open_model(run)
        values = stored_values(opened.model)
        opened.save(directory, opened.model, {})
        leaves = jax.tree.leaves(values)
        kept = tuple(name for name in ("tokenizer", "huggingface") if (directory / name).is_dir())
        size_bytes = sum(leaf.nbytes for leaf in leaves)
        dtype = opened.config.model.param_dtype
        if progress is not None:
            progress(str(directory), size_bytes, size_bytes)
        return Conversion(directory, sum(leaf.size for leaf in leaves), size_bytes, dtype, kept)

    def open_auxiliary(self, directory: Path, name: str, abstract: Any) -> Any:
        """Reads an auxiliary model from the newest intact checkpoint of a run.

        Returns the averaged parameters if the run's optimizer averages.

        Args:
          name: name of the model in the objective's `auxiliary_models`.
          abstract: pytree of the shapes and dtypes of its parameters.

        Raises:
          RunDirectoryError: `directory` is not a run directory.
          ConversionError: the run's objective does not train a model of this name.
          CheckpointError: the run does not have an intact checkpoint, or parameters differ from `abstract` (names
            each).
        """
        config = run_config(directory)
        declared = as_objective(config.objective.build()).auxiliary_models
        trained = {each: make for each, make in declared.items() if not isinstance(make, str)}
        if name not in trained:
            raise ConversionError(
                f"Objective {config.objective.name!r} of {directory} does not train a model {name!r}; it trains: "
                f"{', '.join(trained) or 'none'}. Give a run of another objective."
            )
        optimizer = as_optimizer(config.optimizer)
        settings = (config.model, optimizer, config.run.steps, config.precision)
        auxiliary = trained_model(name, trained[name], *settings)
        with CheckpointStore(RunDirectory(directory).checkpoints) as store:
            # "further" is the branch of auxiliary models in the checkpoint format (see `stack_train.step.state`).
            restored = store.restore_params(abstract, under=f"further/{name}/params")
            if not optimizer.averages:
                return restored.state
            # From the same step, because the run may save another one between the two reads.
            opt_state = store.restore_params(
                auxiliary.abstract.opt_state, restored.step, under=f"further/{name}/opt_state"
            ).state
        return auxiliary.evaluation_params(AuxiliaryState(restored.state, opt_state))


RUN_FORMAT = RunFormat()


def _on_documents(config: RunConfig, source: str, directory: Path) -> RunConfig:
    """Replaces the source of a run's data, or its data and objective.

    Rollouts lack a source, and new preferences lack scores of the reference.
    """
    has_source = "source" in {field.name for field in fields(config.data)}
    if has_source and not isinstance(config.data, AnswersData):
        return replace(config, data=replace(config.data, source=source))
    texts = TextData(source=source, tokenizer=str(RunDirectory(directory).tokenizer))
    texts = replace(texts, seq_tokens=min(texts.seq_tokens, config.model.max_positions))
    return replace(config, data=texts, objective=CausalLMConfig())


def _in_rows(batch: Batch) -> Batch:
    """Flattens the two answers of preferences, [batch, 2, seq], to rows of tokens, which a model takes."""
    return {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items() if array.ndim == 3}


def _for_the_device(batch: Batch) -> Batch:
    """Drops the row ids, which identify the rows' origin and are not an input of the model."""
    return {name: array for name, array in batch.items() if name != "row_ids"}
