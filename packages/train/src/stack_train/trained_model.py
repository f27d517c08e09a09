"""Trained models with what they are measured on, for packages that make other models of them."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from stack_core.config import to_yaml
from stack_core.errors import ConversionError
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.config import RunConfig
from stack_train.data.pipeline import Pipeline, build_pipeline
from stack_train.generative import ModuleCheckpoint, generative_checkpoint, parameters_of
from stack_train.quantization import quantizer_name
from stack_train.run_directory import RunDirectory
from stack_train.weights import holds_codes, load_model, run_config, stored_model
from stack_train.whole_directory import made_whole

__all__ = ["RUN_FORMAT", "RunFormat", "TrainedLanguageModel"]

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainedLanguageModel:
    """A `TrainedModel`.

    Attributes:
      config: of the run that the model is from, or that could have made it.
      tokenizer: where the tokenizer that it was trained with lies.
      step: training steps done.
      copy_files: writes the tokenizer, and other files that go where the model goes, to a run directory.
    """

    model: Any
    config: RunConfig
    tokenizer: Path
    step: int
    copy_files: Callable[[RunDirectory], object]

    @property
    def sections(self) -> Mapping[str, Any]:
        return self.config.sections

    def training_batches(self) -> Iterator[Batch]:
        return map(_for_the_device, self._pipeline.train_iterator())

    def validation_batches(self) -> Iterator[Batch]:
        return map(_for_the_device, self._pipeline.validation_batches())

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, jax.Array]:
        return self._objective(model, batch, key=jax.random.key(0))[1]

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        config = replace(
            self.config,
            output=str(directory),
            data=replace(self.config.data, tokenizer=str(directory / "tokenizer"), vocab_size=None),
            sections={**self.config.sections, **sections},
        )
        with made_whole(directory) as partial:
            run = RunDirectory(partial)
            self.copy_files(run)
            leaves = named_leaves(nnx.to_pure_dict(nnx.state(model)))
            with CheckpointStore(run.checkpoints) as store:
                store.save_weights(leaves.items(), to_yaml(config), step=self.step)
            run.config.write_text(to_yaml(config), encoding="utf-8")

    @cached_property
    def _pipeline(self) -> Pipeline:
        data = replace(self.config.data, tokenizer=str(self.tokenizer), vocab_size=None)
        return build_pipeline(data, seed=self.config.trainer.seed)

    @cached_property
    def _objective(self) -> Any:
        return self.config.objective.build()


class RunFormat:
    """The checkpoint format of run directories, which `stack train` makes and `stack generate` reads."""

    def recognizes(self, directory: Path) -> bool:
        return RunDirectory(directory).config.is_file()

    def open_model(self, directory: Path, *, data: str | None = None) -> TrainedLanguageModel:
        """Opens the newest intact checkpoint of a run, in float also where it was trained by a recipe.

        Args:
          data: address of another source of documents than the run's.

        Raises:
          ConversionError: the run's checkpoints hold quantized parameters.
          RunDirectoryError: there is no run.
          CheckpointError: it has no checkpoint that can be used.
        """
        config = run_config(directory)
        if holds_codes(config):
            raise ConversionError(
                f"The parameters of {directory} are quantized already, by section {quantizer_name(config)} of its "
                "config. Give the run that it was made from."
            )
        if data is not None:
            config = replace(config, data=replace(config.data, source=data))
        run = RunDirectory(directory)

        def copy_files(destination: RunDirectory) -> None:
            for name in ("tokenizer", "huggingface"):
                if (run.path / name).is_dir():
                    shutil.copytree(run.path / name, destination.path / name)

        others = {name: section for name, section in config.sections.items() if name != quantizer_name(config)}
        model, step = load_model(directory, replace(config, sections=others))
        return TrainedLanguageModel(model, config, run.tokenizer, step, copy_files)

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a run, whose newest intact checkpoint is read with the parameters; quantized if the run's model is.

        Raises:
          RunDirectoryError: there is no run.
          GenerationError: its model cannot be generated from, or its tokenizer is another's.
          DataError: its tokenizer is malformed.
        """
        run, config = RunDirectory(directory), run_config(directory)
        return generative_checkpoint(
            stored_model(config),
            read=lambda shardings: parameters_of(load_model(directory, config, shardings)[0]),
            name=directory.resolve().name,
            tokenizer=run.tokenizer,
            origin=directory / "huggingface",
        )


RUN_FORMAT = RunFormat()


def _for_the_device(batch: Batch) -> Batch:
    """Without what says where the rows are from."""
    return {name: array for name, array in batch.items() if name != "row_ids"}
