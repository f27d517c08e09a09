"""Atomic conversions between Hugging Face checkpoints and run directories."""

import json
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import flatten_mapping

from stack_core.abi.adapters import Adapters
from stack_core.abi.config import to_yaml
from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Conversion, Progress, StartingPoint
from stack_core.abi.models import ConvertibleFamily
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.atomic_directory import atomic_directory
from stack_core.text.image_models import ImageModel
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.checkpoint.frozen import FROZEN
from stack_train.data.kinds.text import TextData
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.exchange import component_in, component_of, export_images, import_images
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.pipeline import INDEX
from stack_train.diffusion.sampling import open_images
from stack_train.generation.embedding_settings import EMBEDDING_FILES
from stack_train.generation.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.huggingface.hub import on_disk
from stack_train.huggingface.quantization import QUANTIZATION
from stack_train.huggingface.quantized_export import LAYOUTS, PlannedTensors, quantized_tensors
from stack_train.huggingface.source import (
    PREPROCESSOR,
    PROCESSOR,
    HasProcessor,
    HasRunSections,
    HuggingFaceSource,
    PreprocessesImages,
    open_source,
    read_config,
)
from stack_train.models.weight_map import joined_tensors, shared_tensors
from stack_train.nn.quantized import QuantizedMatrix, with_quantized
from stack_train.optim.optax_optimizer import as_optimizer
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_model, abstract_params, holds_codes
from stack_train.run.transforms import transform_names, transform_of
from stack_train.safetensors_files import TensorSpec, plan_shards, write_shards
from stack_train.variables.adapters import read_adapters
from stack_train.variables.model_variables import stored_values
from stack_train.variables.trained_model import TrainedLanguageModel
from stack_train.variables.weights import read_model, read_params

__all__ = ["FORMAT", "HuggingFaceFormat"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_VIDEO_PREPROCESSOR = "video_preprocessor_config.json"


class HuggingFaceFormat:
    """The model format `hf:DIR`, or `hf:ORG/MODEL` for a model of the hub, which is downloaded.

    An imported run keeps the tokenizer's files under `tokenizer/`. It also keeps `config.json`,
    `generation_config.json` and the files of sentence-transformers under `huggingface/`, and exports write them back
    unchanged. Parameters are converted one by one: memory holds about four of the largest, or 1 GiB if that is more.
    Exports of runs with averaged or frozen parameters load all parameters.
    """

    config_file = _CONFIG
    stored_types = LAYOUTS
    denoiser_formats = ("gguf",)

    def import_run(
        self,
        directory: Path,
        run: Path,
        *,
        ignore: Collection[str] = (),
        denoiser: str | None = None,
        progress: Progress | None = None,
    ) -> Conversion:
        """Converts a Hugging Face checkpoint, or the language model of a multimodal one, to a run directory.

        Diffusers directories are converted by `import_images`.

        Args:
          ignore: keys of `config.json` to ignore.
          denoiser: weights of the denoiser of a diffusers directory, gguf:FILE; None reads the directory's.
          progress: callback with the path of each converted parameter, the bytes done and the total bytes.

        Raises:
          ConversionError: the checkpoint cannot be converted, with a list of all problems; or `run` exists.
          CheckpointError: the disk is full.
        """
        directory = on_disk(directory)
        if component_in(directory):
            if ignore:
                raise ConversionError(f"--ignore is for language models; {directory} is a directory of diffusers.")
            return import_images(directory, run, denoiser=denoiser, progress=progress)
        if denoiser is not None:
            raise ConversionError(f"--denoiser is for directories of diffusers; {directory} has a language model.")
        source = open_source(directory, ignore=ignore)
        with atomic_directory(run) as partial:
            # The path after `atomic_directory` renames its folder.
            sections = _run_sections(source.config, str(run / "tokenizer"))
            config = RunConfig(output=str(run), model=source.config, **sections)
            paths = RunDirectory(partial)
            copied = _copy_to_run(source, paths)
            leaves = _reported(source.leaves(), source.total_bytes, progress)
            with CheckpointStore(paths.checkpoints) as store:
                store.save_weights(leaves, to_yaml(config), total_bytes=source.total_bytes)
            paths.config.write_text(to_yaml(config), encoding="utf-8")
        parameters = sum(leaf.size for leaf in source.parameters.values())
        return Conversion(run, parameters, source.total_bytes, source.config.param_dtype, copied, source.left_out)

    def export_run(
        self,
        run: Path,
        directory: Path,
        *,
        stored: str | None = None,
        max_shard_bytes: int = 5 * 10**9,
        progress: Progress | None = None,
    ) -> Conversion:
        """Converts a run's newest checkpoint to a Hugging Face checkpoint with the dtype of `model.param_dtype`.

        A quantized run becomes a checkpoint of compressed-tensors, GPTQ or AWQ.

        Args:
          stored: layout of a quantized run, from `stored_types`; None uses the first.
          max_shard_bytes: maximum size of a weights file; a larger tensor gets a file to itself.

        Raises:
          ConversionError: Hugging Face has no counterpart of the model, the layout cannot represent its codes, the run
            is not quantized although a layout is given, or `directory` exists.
          RunDirectoryError: `run` is not a run directory.
          CheckpointError: the newest checkpoint of the run is missing or damaged.
        """
        saved = run_config(run)
        config = saved.model
        if stored is not None:
            _check_layout(stored, run, saved)
        if component_of(config.name) is not None:
            if holds_codes(saved):
                raise ConversionError(
                    f"The parameters of {run} are quantized, by section {' and '.join(transform_names(saved))} of its "
                    "config, and diffusers directories are written in float. Convert the run that it was made from."
                )
            return export_images(run, directory, saved)
        family = registries.models[config.name]
        if not isinstance(family, ConvertibleFamily):
            raise ConversionError(f"Models of family {config.name!r} have no Hugging Face counterpart.")
        with atomic_directory(directory) as partial, CheckpointStore(RunDirectory(run).checkpoints) as store:
            if holds_codes(saved):
                planned = _coded_tensors(run, saved, family, stored or LAYOUTS[0])
            else:
                planned = _float_tensors(run, saved, family, store)
            total_bytes = sum(spec.size_bytes for spec in planned.specs)
            special_ids = _special_ids(run / "tokenizer")
            _write_config(run / "huggingface" / _CONFIG, config, family, special_ids, partial / _CONFIG)
            if planned.section:
                mapping = json.loads((partial / _CONFIG).read_bytes())
                _write_json({**mapping, QUANTIZATION: planned.section}, partial / _CONFIG)
            tensors = _reported(planned.tensors(), total_bytes, progress)
            write_shards(partial, plan_shards(planned.specs, max_shard_bytes), tensors)
            copied = _copy(_TOKENIZER_FILES, run / "tokenizer", partial)
            # Without an original file, transformers still needs the ids of the end tokens to stop.
            copied += _copy((_GENERATION_CONFIG,), run / "huggingface", partial) or _write_json(
                special_ids, partial / _GENERATION_CONFIG
            )
            copied += _copy((*EMBEDDING_FILES, _VIDEO_PREPROCESSOR), run / "huggingface", partial)
            if isinstance(family, PreprocessesImages):
                copied += _write_json(family.preprocessor(config), partial / PREPROCESSOR)
            if isinstance(family, HasProcessor):
                copied += _write_json(family.processor(config), partial / PROCESSOR)
        names = ("format", "checkpoint_format", "quant_method")
        layout = next((planned.section[name] for name in names if name in planned.section), None)
        dtype = f"{layout} and {config.param_dtype}" if layout else config.param_dtype
        return Conversion(directory, planned.parameters, total_bytes, dtype, copied)

    def recognizes(self, directory: Path) -> bool:
        return (directory / _CONFIG).is_file()

    def open_model(self, directory: Path, *, data: str | None = None) -> TrainedLanguageModel:
        """Opens a Hugging Face checkpoint.

        Args:
          data: address of the evaluation documents; required, because a checkpoint does not name any.

        Raises:
          ConversionError: `data` is None, or the checkpoint cannot be converted.
        """
        directory = on_disk(directory)
        if data is None:
            raise ConversionError(
                f"{directory} does not name the training data of its model. Give documents for the measurement: "
                f"--data SOURCE, with a source among {', '.join(registries.data_sources.names())}."
            )
        source = _open_language_model(directory)
        if isinstance(registries.models[source.config.name], HasRunSections):
            raise ConversionError(
                f"{directory} is of family {source.config.name!r}, which is not measured on documents. Train a run "
                f"from it, run.init_from: hf:{directory}, and quantize the run."
            )
        if hasattr(source.config, "start_token"):
            raise ConversionError(
                f"{directory} is an encoder-decoder, which is measured on pairs of texts, and --data names documents. "
                f"Train a run on data.name: pairs with run.init_from: hf:{directory}, and quantize the run."
            )
        documents = _fitting(TextData(source=data, tokenizer=str(directory)), source.config)
        config = RunConfig(output=str(directory), model=source.config, data=documents)

        def copy_files(run: RunDirectory) -> None:
            _copy_to_run(source, run)

        return TrainedLanguageModel(_model(source), config, directory, 0, copy_files)

    def open_start(self, directory: Path) -> StartingPoint:
        """Opens a Hugging Face checkpoint as the starting point of a run.

        Raises:
          ConversionError: the checkpoint cannot be converted, or is a diffusers directory.
        """
        directory = on_disk(directory)
        if component_in(directory):
            raise ConversionError(
                f"Runs start from language models of Hugging Face; {directory} is a directory of diffusers. Convert "
                f"it first: stack convert hf:{directory} RUN, then run.init_from=RUN."
            )
        source = _open_language_model(directory)
        tokenizer = directory if (directory / "tokenizer.json").is_file() else None
        return StartingPoint(source.config, source.leaves, tokenizer, directory)

    def has_image_model(self, directory: Path) -> bool:
        """Returns whether a directory, or a model of the hub, is a pipeline of diffusers."""
        return (on_disk(directory) / INDEX).is_file()

    def open_image_model(self, directory: Path) -> ImageModel:
        """Opens a pipeline of diffusers.

        Raises:
          ConversionError: see `stack_train.diffusion.pipeline.open_pipeline`.
        """
        return DiffusionModel(open_images(f"hf:{on_disk(directory)}"), directory.resolve().name)

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a Hugging Face checkpoint for text generation, computed in the dtype of its tensors.

        Quantized matrices stay quantized if products support their form; `dequantized` of the checkpoint reads floats.

        Raises:
          ConversionError: the checkpoint cannot be converted.
          GenerationError: the model cannot generate text, or its tokenizer does not match.
          DataError: its tokenizer is malformed.
        """
        directory = on_disk(directory)
        source = _open_language_model(directory)

        def adapters_at(address: str, quantized: Mapping[str, QuantizedMatrix]) -> Adapters:
            if quantized:
                raise ConversionError(
                    f"The adapters {address} cannot be combined with quantized weights. Read these as floats: "
                    "stack serve --dequantize, or LLM(..., dequantize=True)."
                )
            return read_adapters(address, source.config, lambda: source.digests)

        def opened(quantized: Mapping[str, QuantizedMatrix]) -> ModuleCheckpoint:
            return generative_checkpoint(
                with_quantized(abstract_model(source.config), quantized),
                source.config,
                read=lambda shardings: _parameters(source, quantized),
                adapters_at=lambda address: adapters_at(address, quantized),
                name=directory.resolve().name,
                tokenizer=directory,
                origin=directory,
            )

        quantized = source.quantized()
        checkpoint = opened(quantized)
        return replace(checkpoint, as_floats=lambda: opened({})) if quantized else checkpoint


FORMAT = HuggingFaceFormat()


def _float_tensors(run: Path, saved: RunConfig, family: Any, store: CheckpointStore) -> PlannedTensors:
    abstract = named_leaves(abstract_params(saved.model))
    # Parameters that share a tensor must be written together.
    groups = shared_tensors(family.weight_rules(saved.model))
    rules = [rule for group in groups for rule in group]
    specs = [
        TensorSpec(name, np.dtype(rule.dtype or abstract[rule.parameter].dtype), shape)
        for rule, *_ in groups
        for name, shape in rule.tensor_shapes(abstract[rule.parameter].shape).items()
    ]

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        leaves = _derived_leaves(run, saved, rules) or _stored_leaves(store, rules, abstract)
        # The leaves arrive in the order of `rules`, so each group takes the next ones.
        values = (leaf for _, leaf in leaves)
        for group in groups:
            yield from joined_tensors(group, list(islice(values, len(group)))).items()

    return PlannedTensors({}, specs, tensors, sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in specs))


def _check_layout(stored: str, run: Path, saved: RunConfig) -> None:
    if stored not in LAYOUTS:
        raise ConversionError(f"{stored!r} is not a layout that `hf:` writes; take one of {', '.join(LAYOUTS)}.")
    if not holds_codes(saved):
        raise ConversionError(
            f"{stored!r} is a layout of quantized parameters, and {run} is not quantized. Quantize it first: "
            f"stack quantize {run} --recipe w4_t128 --out DIR."
        )


def _coded_tensors(run: Path, saved: RunConfig, family: Any, stored: str) -> PlannedTensors:
    # Holds the quantized model, and the floats of one parameter at a time.
    model, _ = read_model(run, saved)
    values = {"/".join(map(str, path)): value for path, value in flatten_mapping(stored_values(model)).items()}
    transform = transform_of(saved)
    rules = family.weight_rules(saved.model)
    dtype = jnp.dtype(saved.model.param_dtype)
    return quantized_tensors(values, rules, partial(transform.input_type, model), dtype, stored=stored)


def _model(source: HuggingFaceSource) -> Any:
    params = {path: jnp.asarray(leaf) for path, leaf in _parameters(source)}
    graph, _ = nnx.split(abstract_model(source.config))
    return nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(params)))


def _parameters(
    source: HuggingFaceSource, quantized: Mapping[str, QuantizedMatrix] | None = None
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Reads the parameters with their paths, in which indices into lists of modules are integers."""
    for name, leaf in source.leaves(quantized):
        yield tuple(int(step) if step.isdigit() else step for step in name.split("/")), leaf


def _open_language_model(directory: Path) -> HuggingFaceSource:
    """Opens a checkpoint and warns about parts that are not read."""
    source = open_source(directory)
    if source.left_out:
        warnings.warn(f"{directory} is read without {', '.join(source.left_out)}.", stacklevel=3)
    return source


def _copy_to_run(source: HuggingFaceSource, run: RunDirectory) -> tuple[str, ...]:
    directory, configs = source.directory, run.path / "huggingface"
    copied = _copy(_TOKENIZER_FILES, directory, run.tokenizer)
    others = (_GENERATION_CONFIG, _VIDEO_PREPROCESSOR, *EMBEDDING_FILES)
    if source.rewritten is None:
        return copied + _copy((_CONFIG, *others), directory, configs)
    configs.mkdir(exist_ok=True)
    _write_json(source.rewritten, configs / _CONFIG)
    return copied + _copy(others, directory, configs)


def _copy(names: Iterable[str], source: Path, destination: Path) -> tuple[str, ...]:
    present = tuple(name for name in names if (source / name).is_file())
    for name in present:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, destination / name)
    return present


def _reported(
    leaves: Iterable[tuple[str, Any]], total_bytes: int, progress: Progress | None
) -> Iterator[tuple[str, Any]]:
    done_bytes = 0
    for path, leaf in leaves:
        yield path, leaf
        # Reported once the consumer has taken the next leaf, and so has written this.
        done_bytes += leaf.nbytes
        if progress is not None:
            progress(path, done_bytes, total_bytes)


def _stored_leaves(store: CheckpointStore, rules: Iterable[Any], abstract: Any) -> Iterator[tuple[str, Any]]:
    """Reads the parameters of the newest checkpoint one by one.

    A damaged checkpoint is an error. Falling back to an older one would mix the parameters of two checkpoints.
    """
    step = store.latest()
    names = () if step is None else store.leaf_names(step)
    for rule in rules:
        path = rule.parameter
        # Router biases, which the forward pass updates, are in a separate branch.
        branch = "moved" if f"moved/{path}" in names else "params"
        yield path, store.restore_params(abstract[path], step, under=f"{branch}/{path}").state


def _derived_leaves(run: Path, saved: RunConfig, rules: Iterable[Any]) -> Iterator[tuple[str, Any]] | None:
    """Loads all parameters if the checkpoint stores some only indirectly (averages, frozen ones); otherwise None."""
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        step = store.latest()
        has_frozen = step is not None and (store.path(step) / FROZEN).is_file()
    if not (as_optimizer(saved.optimizer).averages or has_frozen):
        return None
    values = named_leaves(read_params(run, saved.model)[0])
    return ((rule.parameter, values[rule.parameter]) for rule in rules)


def _run_sections(model: Any, tokenizer: str) -> dict[str, Any]:
    """Returns the sections of an imported run that depend on the kind of model."""
    family = registries.models[model.name]
    if isinstance(family, HasRunSections):
        return family.run_sections(tokenizer)
    return {"data": _fitting(TextData(tokenizer=tokenizer), model)}


def _fitting(data: TextData, model: Any) -> TextData:
    """Limits the row length of the data to the model's maximum sequence length."""
    return replace(data, seq_tokens=min(data.seq_tokens, model.max_positions))


def _special_ids(directory: Path) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens under their keys in Hugging Face configs."""
    if not (directory / "tokenizer.json").is_file():
        return {}
    tokenizer = HuggingFaceTokenizer.load(directory)
    found = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    return {name: index for name, index in found.items() if index is not None}


def _write_json(mapping: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Writes a JSON file unless the mapping is empty; returns the names of the written files."""
    if mapping:
        path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
    return (path.name,) if mapping else ()


def _write_config(original_path: Path, config: Any, family: Any, special_ids: Mapping[str, int], path: Path) -> None:
    """Writes `config.json`, or copies the original at `original_path` if it still describes the same model."""
    mapping = family.config_map.write(config)
    if original_path.is_file():
        original_mapping = json.loads(original_path.read_bytes())
        # Weights are always written in float, so the config of a quantized checkpoint cannot be copied.
        plain = {name: value for name, value in original_mapping.items() if name != QUANTIZATION}
        original = read_config(family, plain, dtype=config.param_dtype)
        if plain == original_mapping and family.config_map.write(original) == mapping:
            shutil.copyfile(original_path, path)
            return
    _write_json({**mapping, **special_ids}, path)
