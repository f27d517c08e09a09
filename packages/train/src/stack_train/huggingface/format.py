"""Conversions between Hugging Face checkpoints and run directories, whole or not at all."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.config import to_yaml
from stack_core.errors import ConversionError
from stack_core.plugins import registries
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.config import RunConfig
from stack_train.data.config import DataConfig
from stack_train.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.huggingface.safetensors_files import TensorSpec, plan_shards, write_shards
from stack_train.huggingface.source import HuggingFaceSource, open_source, read_config
from stack_train.quantization import quantizer_name
from stack_train.run_directory import RunDirectory
from stack_train.trained_model import TrainedLanguageModel
from stack_train.weights import abstract_model, abstract_params, holds_codes, run_config
from stack_train.whole_directory import made_whole

__all__ = ["FORMAT", "Conversion", "HuggingFaceFormat"]

Progress = Callable[[str, int, int], None]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
      destination: the directory it made.
      kept: names of the files that were copied byte for byte.
    """

    destination: Path
    parameters: int
    size_bytes: int
    dtype: str
    kept: tuple[str, ...]


class HuggingFaceFormat:
    """The checkpoint format `hf:DIR`.

    A run that comes from one keeps its tokenizer's files under `tokenizer/`, and under `huggingface/` the two configs
    that no run reads whole, so that they go back as they came. Parameters pass one by one: memory holds about four of
    the largest, of which reading takes one, or as many as fill a gibibyte.
    """

    def import_run(self, directory: Path, run: Path, *, progress: Progress | None = None) -> Conversion:
        """Makes a run directory of a Hugging Face checkpoint.

        Args:
          progress: receives each parameter's path, the bytes done, and the bytes in all.

        Raises:
          ConversionError: the checkpoint cannot be converted, naming all that is wrong with it; or `run` exists.
          CheckpointError: the disk is full.
        """
        source = open_source(directory)
        with made_whole(run) as partial:
            config = RunConfig(output=str(run), model=source.config, data=DataConfig(tokenizer=str(run / "tokenizer")))
            paths = RunDirectory(partial)
            kept = _copy_to_run(directory, paths)
            leaves = _reported(source.leaves(), source.total_bytes, progress)
            with CheckpointStore(paths.checkpoints) as store:
                store.save_weights(leaves, to_yaml(config), total_bytes=source.total_bytes)
            paths.config.write_text(to_yaml(config), encoding="utf-8")
        itemsize = np.dtype(source.config.param_dtype).itemsize
        return Conversion(run, source.total_bytes // itemsize, source.total_bytes, source.config.param_dtype, kept)

    def export_run(
        self, run: Path, directory: Path, *, max_shard_bytes: int = 5 * 10**9, progress: Progress | None = None
    ) -> Conversion:
        """Makes a Hugging Face checkpoint of a run's newest checkpoint, in the dtype of its parameters.

        Args:
          max_shard_bytes: size of a file of weights, unless a single tensor is larger.

        Raises:
          ConversionError: the model has no Hugging Face counterpart or is quantized, or `directory` exists.
          RunDirectoryError: there is no run.
          CheckpointError: there is no checkpoint, or it is damaged.
        """
        saved = run_config(run)
        if holds_codes(saved):
            raise ConversionError(
                f"The parameters of {run} are quantized, by section {quantizer_name(saved)} of its config, and Hugging "
                "Face checkpoints have no place for that. Convert the run that it was made from."
            )
        config = saved.model
        family = registries.models[config.family]
        if not hasattr(family, "config_map"):
            raise ConversionError(f"Models of family {config.family!r} have no Hugging Face counterpart.")
        abstract = named_leaves(abstract_params(config))
        rules = family.weight_rules(config)
        specs = [
            TensorSpec(name, np.dtype(abstract[rule.parameter].dtype), shape)
            for rule in rules
            for name, shape in rule.tensor_shapes(abstract[rule.parameter].shape).items()
        ]
        total_bytes = sum(spec.size_bytes for spec in specs)
        with made_whole(directory) as partial, CheckpointStore(RunDirectory(run).checkpoints) as store:
            _write_config(run / "huggingface" / _CONFIG, config, family, partial / _CONFIG)
            leaves = _reported(_stored_leaves(store, rules, abstract), total_bytes, progress)
            tensors = (
                tensor for rule, (_, leaf) in zip(rules, leaves, strict=True) for tensor in rule.tensors(leaf).items()
            )
            write_shards(partial, plan_shards(specs, max_shard_bytes), tensors)
            kept = _copy(_TOKENIZER_FILES, run / "tokenizer", partial)
            kept += _copy((_GENERATION_CONFIG,), run / "huggingface", partial)
        parameters = sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in specs)
        return Conversion(directory, parameters, total_bytes, config.param_dtype, kept)

    def recognizes(self, directory: Path) -> bool:
        return (directory / _CONFIG).is_file()

    def open_model(self, directory: Path, *, data: str | None = None) -> TrainedLanguageModel:
        """Opens a Hugging Face checkpoint.

        Args:
          data: address of the documents to measure on; a checkpoint names none, so that it is not optional here.

        Raises:
          ConversionError: no data is given, or the checkpoint cannot be converted.
        """
        if data is None:
            raise ConversionError(
                f"{directory} does not say what its model was trained on. Give documents to measure on: "
                f"--data SOURCE, with a source among {', '.join(registries.data_sources.names())}."
            )
        source = open_source(directory)
        defaults = DataConfig(source=data, tokenizer=str(directory))
        seq_tokens = min(defaults.seq_tokens, source.config.max_positions)
        config = RunConfig(output=str(directory), model=source.config, data=replace(defaults, seq_tokens=seq_tokens))

        def copy_files(run: RunDirectory) -> None:
            _copy_to_run(directory, run)

        return TrainedLanguageModel(_model(source), config, directory, 0, copy_files)

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a Hugging Face checkpoint, to be computed in the dtype of its tensors.

        Raises:
          ConversionError: it cannot be converted.
          GenerationError: its model cannot be generated from, or its tokenizer is another's.
          DataError: its tokenizer is malformed.
        """
        source = open_source(directory)
        return generative_checkpoint(
            abstract_model(source.config),
            read=lambda shardings: _parameters(source),
            name=directory.resolve().name,
            tokenizer=directory,
            origin=directory,
        )


FORMAT = HuggingFaceFormat()


def _model(source: HuggingFaceSource) -> Any:
    params = {path: jnp.asarray(leaf) for path, leaf in _parameters(source)}
    graph, _ = nnx.split(abstract_model(source.config))
    return nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(params)))


def _parameters(source: HuggingFaceSource) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    return ((tuple(path.split("/")), leaf) for path, leaf in source.leaves())


def _copy_to_run(directory: Path, run: RunDirectory) -> tuple[str, ...]:
    kept = _copy(_TOKENIZER_FILES, directory, run.tokenizer)
    return kept + _copy((_CONFIG, _GENERATION_CONFIG), directory, run.path / "huggingface")


def _copy(names: Iterable[str], source: Path, destination: Path) -> tuple[str, ...]:
    present = tuple(name for name in names if (source / name).is_file())
    if present:
        destination.mkdir(exist_ok=True)
    for name in present:
        shutil.copyfile(source / name, destination / name)
    return present


def _reported(
    leaves: Iterable[tuple[str, Any]], total_bytes: int, progress: Progress | None
) -> Iterator[tuple[str, Any]]:
    done_bytes = 0
    for path, leaf in leaves:
        yield path, leaf
        done_bytes += leaf.nbytes
        if progress is not None:
            progress(path, done_bytes, total_bytes)


def _stored_leaves(store: CheckpointStore, rules: Iterable[Any], abstract: Any) -> Iterator[tuple[str, Any]]:
    """Reads the newest checkpoint's parameters one by one; a damaged one is an error, and not passed over midway."""
    step = store.latest()
    for rule in rules:
        path = rule.parameter
        yield path, store.restore_params(abstract[path], step, under=f"params/{path}").state


def _write_config(kept: Path, config: Any, family: Any, path: Path) -> None:
    """Writes the config; the one that the run was converted from stays as it is as long as it says the same."""
    mapping = family.config_map.write(config)
    if kept.is_file():
        original = read_config(family, json.loads(kept.read_bytes()), dtype=config.param_dtype)
        if family.config_map.write(original) == mapping:
            shutil.copyfile(kept, path)
            return
    path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
