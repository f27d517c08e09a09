"""Hugging Face checkpoints, validated completely before any values are read."""

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, nearest
from stack_core.abi.models import ConvertibleFamily, FitsTensors, IsPart
from stack_core.abi.plugins import registries
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint import named_leaves
from stack_train.checkpoint.leaves import LeafSpec, spec_of
from stack_train.huggingface.codes import QuantizedTensor
from stack_train.huggingface.language_part import language_part
from stack_train.huggingface.quantization import with_codes
from stack_train.models.weight_map import WeightRule, stored_rules
from stack_train.nn.quantized import QuantizedMatrix, empty_arrays, writable_arrays
from stack_train.run.model import abstract_params
from stack_train.safetensors_files import StoredTensor, read_tensors

__all__ = [
    "PREPROCESSOR",
    "PROCESSOR",
    "HasProcessor",
    "HasRunSections",
    "HuggingFaceSource",
    "PreprocessesImages",
    "open_source",
    "read_config",
]

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"

# A transposed copy of a full matrix reads a cache line for each number: 0.16 GB/s, and 2.0 GB/s in blocks of 64 rows.
_BLOCK_ROWS = 64
# Bounds the tensors in memory.
_MOST_READERS = 8


@runtime_checkable
class RenamesTensors(Protocol):
    """A family whose checkpoints are also written with other names of tensors than the published ones."""

    def published_name(self, tensor: str) -> str: ...


@runtime_checkable
class ExtractsItself(Protocol):
    """A family that extracts its model from checkpoints of the larger models of `IsPart.published_in`."""

    def part_of(
        self, mapping: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor], tuple[str, ...]]: ...


@runtime_checkable
class OmitsParts(Protocol):
    """A family whose checkpoints may have parts that its model omits, such as a tower for audio.

    `omit_parts` returns the `config.json`, the tensors, and descriptions of the omitted parts.
    """

    def omit_parts(
        self, mapping: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor], tuple[str, ...]]: ...


@runtime_checkable
class PreprocessesImages(Protocol):
    """A family whose config includes the preprocessing of images, which checkpoints have in a separate file."""

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any: ...

    def preprocessor(self, config: Any) -> dict[str, Any]: ...


@runtime_checkable
class HasProcessor(Protocol):
    """A family whose config includes settings of `processor_config.json`, such as tokens around images."""

    def processed(self, config: Any, mapping: Mapping[str, Any]) -> Any: ...

    def processor(self, config: Any) -> dict[str, Any]: ...


@runtime_checkable
class HasRunSections(Protocol):
    """A family of models other than language models, whose runs have other data and another objective."""

    def run_sections(self, tokenizer: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class HuggingFaceSource:
    """A checkpoint whose tensors have been matched to the parameters of a model.

    Attributes:
      directory: directory of the checkpoint.
      config: config of the model; its `param_dtype` and `dtype` are the dtype of the tensors, or float32 if the
        checkpoint mixes dtypes.
      tensors: tensors of the checkpoint by name.
      parameters: shapes and dtypes of the model's parameters, by path.
      rules: locations of the parameters in this checkpoint's layout.
      rewritten: the `config.json` of the model if it differs from the file: a part of the checkpoint was extracted, or
        keys were ignored. Otherwise None.
      left_out: descriptions of the parts that are not read, for messages.
    """

    directory: Path
    config: Any
    tensors: Mapping[str, StoredTensor]
    parameters: Mapping[str, jax.ShapeDtypeStruct]
    rules: Sequence[WeightRule]
    rewritten: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.parameters.values())

    @cached_property
    def digests(self) -> Mapping[str, tuple[LeafSpec, str]]:
        """Shape, dtype and digest of each parameter by path; reads all values."""
        return {name: (spec_of(leaf), array_digests({name: leaf})[name]) for name, leaf in self.leaves()}

    def quantized(self) -> dict[str, QuantizedMatrix]:
        """Returns the parameters that may stay quantized, and warns of codes that are read as floats.

        All layers of a parameter need codes of the same form, for a matrix [d_in, d_out] that only products read.
        """
        found, floats = dict[str, QuantizedMatrix](), Counter[str]()
        for rule in self.rules:
            shape = self.parameters[rule.parameter].shape
            tensors = [self.tensors[name] for name in rule.tensor_shapes(shape)]
            coded = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
            forms = {tensor.form for tensor in coded}
            form = forms.pop() if len(forms) == 1 and len(coded) == len(tensors) else None
            # Parts along the inputs would cut groups.
            is_product = rule.transposed and (rule.part[1] == 1 or rule.part_axis == -2)
            if form is None or not is_product or "router" in rule.parameter:
                floats.update(tensor.scheme for tensor in coded)
                continue
            scale = jax.ShapeDtypeStruct((*shape[:-2], form.groups, shape[-1]), jnp.float32)
            codes = jax.ShapeDtypeStruct(shape, jnp.dtype(form.dtype))
            zeros = scale if form.has_zero_points else None
            found[rule.parameter] = QuantizedMatrix(codes, scale, zeros, coded[0].scheme)
        if floats:
            counts = ", ".join(f"{count} in {scheme}" for scheme, count in floats.items())
            warnings.warn(f"{self.directory} has quantized matrices that are read as floats: {counts}.", stacklevel=3)
        return found

    def leaves(self, quantized: Mapping[str, QuantizedMatrix] | None = None) -> Iterator[tuple[str, Any]]:
        """Reads the parameters one by one with their paths; memory holds one parameter and up to eight tensors.

        Args:
          quantized: parameters that stay quantized, by path, as returned by `quantized`.
        """
        for rule in self.rules:
            yield rule.parameter, self._leaf(rule, (quantized or {}).get(rule.parameter))

    def _leaf(self, rule: WeightRule, matrix: QuantizedMatrix | None) -> Any:
        # Filled tensor by tensor, because a stacked parameter has a tensor for each layer.
        leaf = empty_arrays(self.parameters[rule.parameter] if matrix is None else matrix)
        parts = [rule.tensors(array) for array in writable_arrays(leaf)]

        def fill(name: str) -> None:
            tensor = self.tensors[name]
            is_coded = matrix is not None and isinstance(tensor, QuantizedTensor)
            arrays = tensor.decode().arrays() if is_coded else [tensor.read()]
            for part, array in zip(parts, arrays, strict=True):
                _copy(part[name], rule.part_of(array))

        with ThreadPoolExecutor(min(len(parts[0]), os.cpu_count() or 1, _MOST_READERS)) as readers:
            # A list, because exceptions are raised when a result is read.
            list(readers.map(fill, parts[0]))
        return leaf


def _copy(part: np.ndarray, tensor: np.ndarray) -> None:
    """Copies a tensor into its part of a parameter, in blocks of rows if the part is transposed in memory."""
    if part.dtype == tensor.dtype:
        # NumPy copies bfloat16 number by number and holds the GIL meanwhile.
        bits = np.dtype(f"u{part.dtype.itemsize}")
        part, tensor = part.view(bits), tensor.view(bits)
    if part.ndim < 2 or part.strides[-1] <= part.strides[-2]:
        part[...] = tensor
        return
    for start in range(0, part.shape[-2], _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        part[..., rows, :] = tensor[..., rows, :]


def open_source(directory: Path, *, ignore: Collection[str] = ()) -> HuggingFaceSource:
    """Reads the config and the headers of a checkpoint and checks every tensor against the model.

    Args:
      ignore: keys of `config.json` to ignore.

    Raises:
      ConversionError: the directory does not contain a checkpoint; its architecture or a setting is not supported; or
        tensors are missing, unexpected, or have the wrong shape or dtype. Lists every problem.
    """
    mapping, coding = with_codes(_read_config(directory), read_tensors(directory))
    tensors = coding.tensors
    if coding.unapplied:
        warnings.warn(
            f"{directory}: its quantization_config prescribes {', '.join(coding.unapplied)}, which are not applied: "
            "they stay in float. For quantized inputs, quantize the model by a recipe, as in stack quantize hf:DIR "
            "--recipe w8a8 --data DOCUMENTS --out RUN.",
            stacklevel=2,
        )
    family = _family_of(mapping, directory)
    if isinstance(family, RenamesTensors):
        tensors = {family.published_name(name): tensor for name, tensor in tensors.items()}
    part, tensors, left_out = _part_of(family, mapping, tensors)
    rewritten = None if part is mapping else part
    mapping = part
    if ignore:
        mapping = rewritten = _without(mapping, ignore)
    # In bfloat16 first: parameters that are float32 even then do not decide the dtype of the checkpoint.
    config = read_config(family, mapping, dtype="bfloat16")
    if isinstance(family, FitsTensors):
        config = family.fitting(config, tensors)
    if isinstance(family, PreprocessesImages):
        config = family.preprocessed(config, _read_preprocessor(directory))
    if isinstance(family, HasProcessor):
        config = family.processed(config, _read_mapping(directory / PROCESSOR) or {})
    parameters = named_leaves(abstract_params(config))
    shapes = {path: leaf.shape for path, leaf in parameters.items()}
    rules = stored_rules(family.weight_rules(config), tensors, shapes)
    _check_tensors(directory, rules, family.redundant_tensors(config), parameters, tensors)
    dtype = _dtype(rules, parameters, tensors)
    config = replace(config, dtype=dtype, param_dtype=dtype)
    parameters = named_leaves(abstract_params(config))
    return HuggingFaceSource(directory, config, tensors, parameters, rules, rewritten, left_out)


def _part_of(
    family: Any, mapping: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor], tuple[str, ...]]:
    """Returns the part of a checkpoint that belongs to a family, and descriptions of the rest.

    The part has a `config.json`, which is `mapping` if the part is the complete checkpoint, and tensors.
    """
    if _architecture(mapping) == family.config_map.architecture:
        found = family.omit_parts(mapping, tensors) if isinstance(family, OmitsParts) else None
        return found if found is not None and found[2] else (mapping, tensors, ())
    if isinstance(family, ExtractsItself):
        return family.part_of(mapping, tensors)
    names = {"architecture": family.config_map.architecture, "model_type": family.config_map.model_type}
    part = language_part(mapping, tensors, **names)
    return part.config, part.tensors, part.left_out


def read_config(family: Any, mapping: Mapping[str, Any], *, dtype: str = "float32") -> Any:
    """Converts a `config.json` to a model config whose parameters and activations have the dtype `dtype`.

    Raises:
      ConversionError: a setting is invalid, or the family does not support its value.
    """
    settings = {"name": family.name, "dtype": dtype, "param_dtype": dtype}
    try:
        return parse(family.config_class, {**family.config_map.read(mapping), **settings})
    except ConfigError as error:
        raise ConversionError(f"config.json describes no valid {family.name} model: {error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    mapping = _read_mapping(directory / "config.json")
    if mapping is None:
        problem = f"{directory} has no config.json" if directory.is_dir() else f"{directory} is not a directory"
        raise ConversionError(
            f"{problem}. Give the directory of a Hugging Face checkpoint, with config.json and model.safetensors. "
            "Files of llama.cpp are opened as gguf:FILE, models of the hub as hf:ORG/MODEL."
        )
    return mapping


def _read_preprocessor(directory: Path) -> Mapping[str, Any]:
    """Returns the preprocessing of images; transformers 5 writes it to the processor's file."""
    processor = _read_mapping(directory / PROCESSOR) or {}
    own = processor.get("image_processor")
    return own if isinstance(own, Mapping) else _read_mapping(directory / PREPROCESSOR) or {}


def _read_mapping(path: Path) -> dict[str, Any] | None:
    """Returns the contents of a JSON file, or None without the file."""
    try:
        mapping = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}. A Hugging Face checkpoint has one.") from error
    if not isinstance(mapping, dict):
        raise ConversionError(f"{path} holds a {type(mapping).__name__}; an object was expected.")
    return mapping


def _family_of(mapping: Mapping[str, Any], directory: Path) -> Any:
    families = [registries.models[name] for name in registries.models]
    known = {family.config_map.architecture: family for family in families if isinstance(family, ConvertibleFamily)}
    parts: list[tuple[str, Any]] = [
        (name, family) for family in families if isinstance(family, IsPart) for name in family.published_in
    ]
    # Several families may be part of the same multimodal architecture. The family with the `model_type` of the text
    # config is sorted to the end, because `dict` keeps the last value of a key.
    text = mapping.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    parts.sort(key=lambda part: part[1].config_map.model_type == kind)
    # An architecture of its own takes precedence over the same name as a part of a larger model.
    known = dict(parts) | known
    if not mapping.get("architectures"):
        raise ConversionError(
            f"{directory}: config.json has no key 'architectures', which names the model's class. Add it."
        )
    if (architecture := _architecture(mapping)) not in known:
        raise ConversionError(
            f"{directory} is of architecture {architecture!r}, which no installed model has."
            f"{nearest(architecture, known)} Supported: {', '.join(sorted(known)) or 'none'}."
        )
    return known[architecture]


def _architecture(mapping: Mapping[str, Any]) -> str:
    return str((mapping.get("architectures") or ["none"])[0])


def _without(mapping: Mapping[str, Any], keys: Collection[str]) -> Mapping[str, Any]:
    if unknown := [key for key in keys if key not in mapping]:
        raise ConversionError(
            f"config.json has no key {', '.join(map(repr, unknown))} to ignore.{nearest(unknown[0], mapping)} Leave it "
            "out."
        )
    return {key: value for key, value in mapping.items() if key not in keys}


def _check_tensors(
    directory: Path,
    rules: Sequence[WeightRule],
    redundant: Mapping[str, str | None],
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, StoredTensor],
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    integers = set[str]()
    for rule in rules:
        shapes = rule.tensor_shapes(parameters[rule.parameter].shape)
        expected |= shapes
        integers |= shapes.keys() if rule.dtype is not None else set()
    problems = [f"{name} is missing; expected shape {shape}" for name, shape in expected.items() if name not in tensors]
    problems += [
        f"{name} has shape {tensors[name].shape}; expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems += [
        f"{name} has dtype {tensors[name].dtype}; F32, F16 and BF16 are read"
        for name in expected
        if name in tensors and tensors[name].numpy_dtype is None and name not in integers
    ]
    problems += [
        f"{name} has dtype {tensors[name].dtype}; I32 and I64 are read"
        for name in integers
        if name in tensors and tensors[name].dtype not in ("I32", "I64")
    ]
    for name in tensors.keys() - expected.keys():
        problems += _problem_of_extra(name, tensors, redundant)
    if problems:
        raise ConversionError(
            f"The weights in {directory} are not those of its config.json ({len(problems)} tensors):\n  "
            + "\n  ".join(sorted(problems))
        )


def _dtype(
    rules: Sequence[WeightRule],
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, StoredTensor],
) -> str:
    """Returns a dtype that represents all tensors exactly: their own, or float32 if they have several.

    Args:
      parameters: shapes and dtypes of the parameters if the model is built in bfloat16. Parameters that are float32
        even then, such as router biases, do not count.
    """
    found = {
        str(tensors[name].numpy_dtype)
        for rule in rules
        if parameters[rule.parameter].dtype == jnp.bfloat16
        for name in rule.tensor_shapes(parameters[rule.parameter].shape)
    }
    return found.pop() if len(found) == 1 else "float32"


def _problem_of_extra(name: str, tensors: Mapping[str, StoredTensor], redundant: Mapping[str, str | None]) -> list[str]:
    for pattern, original in redundant.items():
        # The pattern is escaped as text, so its placeholder is escaped, too.
        if re.fullmatch(re.escape(pattern).replace(re.escape("{layer}"), r"\d+"), name):
            # `_check_tensors` reports an original that is missing or has an unsupported dtype.
            known = original in tensors and tensors[original].numpy_dtype is not None
            same = original is None or not known or _equal(tensors[name], tensors[original])
            return [] if same else [f"{name} differs from {original}, to which config.json ties it"]
    # AutoGPTQ adds a bias of zeros to every quantized layer.
    weight = tensors.get(f"{name.removesuffix('.bias')}.weight")
    if name.endswith(".bias") and isinstance(weight, QuantizedTensor) and not tensors[name].read().any():
        return []
    return [f"{name} is unexpected; it has shape {tensors[name].shape}"]


def _equal(left: StoredTensor, right: StoredTensor) -> bool:
    """Returns whether two tensors are equal bit by bit; as numbers, NaN would not equal itself."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    left_bytes, right_bytes = (tensor.read().reshape(-1).view(np.uint8) for tensor in (left, right))
    return np.array_equal(left_bytes, right_bytes)
