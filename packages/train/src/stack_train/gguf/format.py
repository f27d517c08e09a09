"""The model format `gguf:FILE`: conversions between GGUF files and run directories."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.adapters import Adapters
from stack_core.abi.config import parse, to_yaml
from stack_core.abi.errors import ConfigError, ConversionError
from stack_core.abi.formats import Conversion, Progress
from stack_core.abi.installing import install_command
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.chips.machine import usable_cores
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.kinds.text import TextData
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.generative import ModuleCheckpoint, generative_checkpoint
from stack_train.gguf.blocks import dequantize
from stack_train.gguf.fitted import FITTED, K_QUANTS, quantize
from stack_train.gguf.importance import Importance
from stack_train.gguf.names import (
    ARCHITECTURES,
    ROPE_FREQUENCIES,
    ROUTER,
    Architecture,
    architecture_of,
    settings_of,
)
from stack_train.gguf.quantized import FORMS, convert, matrix_struct
from stack_train.gguf.reader import MAGIC, GgufFile, read_file
from stack_train.gguf.vocabulary import Vocabulary
from stack_train.models.weight_map import WeightRule
from stack_train.nn.quantized import QuantizedMatrix, empty_arrays, with_quantized, writable_arrays
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import abstract_model, abstract_params, holds_codes
from stack_train.variables.weights import read_params

__all__ = ["FORMAT", "GgufFormat"]

# Numbers of llama.cpp's file types (LLAMA_FTYPE).
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
# As in llama.cpp, of rows that do not divide into blocks of 256.
_IN_BLOCKS_OF_32 = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_MOST_THREADS = 8
_COPIED_ROWS = 64
_FLOATS = ("F32", "F16", "BF16", "F64")


class GgufFormat:
    """The model format `gguf:FILE` of llama.cpp; requires stack-train[gguf].

    Matrices are written as F16, Q8_0, Q6_K or Q4_0, or as llama.cpp's mixtures Q5_K_M and Q4_K_M: Q6_K for the values
    and the output of the MLP in half of the layers, and Q5_K or Q4_K for the others. With less than eight bits, the
    matrix that computes the logits is Q6_K: the head, or the embedding of a model with tied embeddings. K-quants need
    rows of a multiple of 256 entries; others become Q8_0, Q5_1 and Q5_0, or F16 if 32 does not divide them. Types of
    less than eight bits can be fitted to the importance of columns. Vectors and routers are F32.

    All types that the `gguf` package can dequantize are read, as float32. A file contains the tokenizer and its chat
    template. Imports hold one parameter in memory; exports load the model and convert one tensor at a time. Models
    opened for generation keep the quantized types in `gguf.quantized.FORMS` quantized.

    Attributes:
      stored_types: types of matrices that can be written; the first is the default.
      fits_importance: True; types of less than eight bits are fitted to the importance of columns.
    """

    stored_types = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
    fits_importance = True

    def recognizes(self, directory: Path) -> bool:
        if not directory.is_file():
            return False
        with directory.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def export_run(
        self,
        run: Path,
        directory: Path,
        *,
        stored: str | None = None,
        importance: Path | None = None,
        progress: Progress | None = None,
    ) -> Conversion:
        """Converts a run's newest checkpoint to a file, atomically and with merged adapters.

        Args:
          directory: path of the file.
          stored: storage type, from `stored_types`; None uses the first.
          importance: file with the mean squared inputs of matrices, by parameter or of llama.cpp; None fits none.

        Raises:
          ConversionError: GGUF cannot represent the model, a setting or the tokenizer; the importance belongs to
            another model; or the file exists.
        """
        gguf, stored = _library(), stored or self.stored_types[0]
        if stored not in self.stored_types:
            raise ConversionError(
                f"{stored!r} is not a type that can be written; take one of {', '.join(self.stored_types)}."
            )
        if directory.exists():
            raise ConversionError(f"{directory} exists; a conversion overwrites nothing. Choose a new path.")
        if importance is not None and stored in ("F16", "Q8_0"):
            raise ConversionError(
                f"--importance has no effect on {stored}, which is not fitted. Add --stored Q4_K_M, or leave it out."
            )
        saved = run_config(run)
        if holds_codes(saved):
            raise ConversionError(f"The parameters of {run} are quantized. Convert the run that it was made from.")
        config = saved.model
        architecture = architecture_of(config)
        # Before the weights are read, which takes longer than all checks.
        vocabulary = Vocabulary.of(HuggingFaceTokenizer.load(run / "tokenizer"), config.vocab_size)
        leaves = named_leaves(read_params(run, config)[0])
        weighted = None if importance is None else Importance.read(gguf, importance)
        tensors = list(_tensors(gguf, config, architecture, leaves, stored, weighted))
        if weighted is not None:
            weighted.check_used()
        directory.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic only within a file system.
        partial = directory.with_name(f".{directory.name}.partial")
        try:
            writer = gguf.GGUFWriter(partial, architecture.name)
            writer.add_name(run.resolve().name)
            writer.add_file_type(_FILE_TYPES[stored])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            if importance is not None:
                writer.add_string("quantize.imatrix.file", importance.name)
            for key, value in (*settings_of(config, architecture), *vocabulary.settings()):
                _add(gguf, writer, key, value)
            _write(gguf, writer, tensors, progress)
            partial.rename(directory)
        except OSError as error:
            raise ConversionError(f"{directory} cannot be written: {error}.") from error
        finally:
            partial.unlink(missing_ok=True)
        parameters = sum(int(leaf.size) for leaf in leaves.values())
        return Conversion(directory, parameters, directory.stat().st_size, stored, ("the tokenizer",))

    def import_run(self, directory: Path, run: Path, *, progress: Progress | None = None) -> Conversion:
        """Converts a file to a run directory with float32 parameters.

        Args:
          directory: path of the file.

        Raises:
          ConversionError: the file is not a valid GGUF file; its architecture, a tensor type or its tokenizer is not
            supported; its tensors do not match its settings (all are listed); or `run` exists.
        """
        source = _Source.open(directory)
        with atomic_directory(run) as partial:
            paths = RunDirectory(partial)
            paths.tokenizer.mkdir()
            for name, content in source.vocabulary.files().items():
                (paths.tokenizer / name).write_bytes(content)
            data = TextData(tokenizer=str(run / "tokenizer"))
            data = replace(data, seq_tokens=min(data.seq_tokens, source.config.max_positions))
            config = RunConfig(output=str(run), model=source.config, data=data)
            with CheckpointStore(paths.checkpoints) as store:
                leaves = source.leaves(progress)
                store.save_weights(leaves, to_yaml(config), total_bytes=source.total_bytes)
            paths.config.write_text(to_yaml(config), encoding="utf-8")
        parameters = sum(leaf.size for leaf in source.parameters.values())
        return Conversion(run, parameters, source.total_bytes, "float32", ("the tokenizer",))

    def open_for_generation(self, directory: Path) -> ModuleCheckpoint:
        """Opens a file for text generation, with its tokenizer and chat template; nothing is written.

        Activations are float32. Quantized matrices stay quantized; `dequantized` of the checkpoint reads them as
        float32.

        Args:
          directory: path of the file.

        Raises:
          ConversionError: as `import_run`.
          GenerationError: the tokenizer has more tokens than the model.
        """
        source = _Source.open(directory)
        quantized = source.quantized()
        tokenizer = HuggingFaceTokenizer(source.vocabulary.files(), str(directory))

        def opened(quantized: Mapping[str, QuantizedMatrix]) -> ModuleCheckpoint:
            return generative_checkpoint(
                with_quantized(abstract_model(source.config), quantized),
                source.config,
                read=lambda shardings: source.values(quantized),
                adapters_at=lambda address: _refuse_adapters(address, directory),
                name=directory.stem,
                tokenizer=tokenizer,
                origin=None,
            )

        checkpoint = opened(quantized)
        return replace(checkpoint, as_floats=lambda: opened({})) if quantized else checkpoint


FORMAT = GgufFormat()


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write.

    Attributes:
      name: name in the file.
      shape: shape of the tensor.
      type: GGML type in the file.
      read: returns the values in the layout of the file, before quantization.
      importance: mean squared inputs, float32[..., 1, d_in], or None.
    """

    name: str
    shape: tuple[int, ...]
    type: Any
    read: Callable[[], np.ndarray]
    importance: np.ndarray | None = None


def _tensors(
    gguf: Any,
    config: Any,
    architecture: Architecture,
    leaves: Mapping[str, Any],
    stored: str,
    importance: Importance | None,
) -> Iterator[_Tensor]:
    heads = _reordered(config)
    for rule in architecture.rules(config):
        for name, shape in rule.tensor_shapes(leaves[rule.parameter].shape).items():
            # Defaults bind the values of this iteration; the tensor is read after the loop has ended.
            def read(rule: WeightRule = rule, name: str = name) -> np.ndarray:
                view = rule.tensors(np.asarray(leaves[rule.parameter], np.float32))[name]
                return architecture.stored(name, view, heads)

            own = architecture.name_of(name)
            is_logits = name == ("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
            kind = _mixed(stored, own, config.layers, is_logits=is_logits)
            type_ = _type_of(gguf, own, shape, kind)
            columns = None
            if importance is not None and type_.name in FITTED:
                columns = importance.of(rule, name, own, leaves[rule.parameter].shape)
            yield _Tensor(own, shape, type_, read, columns)
    if isinstance(config.rope_scaling, ops.Llama3Scaling):
        factors = _rope_factors(config.rope_scaling, config)
        yield _Tensor(ROPE_FREQUENCIES, factors.shape, gguf.GGMLQuantizationType.F32, lambda: factors)


def _reordered(config: Any) -> dict[str, int]:
    """Returns the number of heads of each projection whose rows are reordered if RoPE rotates adjacent features."""
    return {"q_proj": config.heads, "k_proj": config.kv_head_count}


def _rope_factors(scaling: ops.Llama3Scaling, config: Any) -> np.ndarray:
    """Returns the divisors of the rotary frequencies, float32[head_dim / 2]."""
    plain = config.rope_theta ** -(np.arange(0, config.head_size, 2) / config.head_size)
    with jax.ensure_compile_time_eval():
        scaled, _ = scaling.frequencies(config.rope_theta, config.head_size, jnp.zeros((1, 1), jnp.int32))
    return (plain / np.asarray(scaled, np.float64)).astype(np.float32)


def _mixed(stored: str, tensor: str, layers: int, *, is_logits: bool) -> str:
    """Returns the type that llama.cpp gives a matrix in a file of the type `stored` (`llama_tensor_get_type`)."""
    if stored in ("F16", "Q8_0"):
        return stored
    if is_logits:
        return "Q6_K"
    if not stored.endswith("_M"):
        return stored
    _, _, rest = tensor.partition("blk.")
    number = int(rest.partition(".")[0]) if rest else 0
    eighth = layers // 8
    is_sensitive = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
    is_mixed = "attn_v." in tensor or "ffn_down" in tensor
    return "Q6_K" if is_mixed and is_sensitive else stored.removesuffix("_M")


def _type_of(gguf: Any, name: str, shape: Sequence[int], stored: str) -> Any:
    """Returns a tensor's type: F32 for vectors and routers, else `stored` or what its rows divide into."""
    types = gguf.GGMLQuantizationType
    if len(shape) == 1 or ROUTER in name:
        return types.F32
    for each in (stored, _IN_BLOCKS_OF_32.get(stored, "F16")):
        if shape[-1] % gguf.GGML_QUANT_SIZES[types[each]][0] == 0:
            return types[each]
    return types.F16


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    # First, because a bool is an int in Python.
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write(gguf: Any, writer: Any, tensors: Sequence[_Tensor], progress: Progress | None) -> None:
    """Writes the file, converting one tensor at a time."""
    # The header comes first and contains the sizes, so these are computed before any tensor is converted.
    sizes = {}
    for each in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[each.type]
        sizes[each.name] = int(np.prod(each.shape)) // block * block_bytes
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), sizes[each.name], each.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done_bytes, total_bytes = 0, sum(sizes.values())
    for each in tensors:
        values = np.ascontiguousarray(each.read(), np.float32)
        is_fitted = each.importance is not None or each.type.name in K_QUANTS
        writer.write_tensor_data(
            quantize(values, each.type.name, each.importance) if is_fitted else gguf.quants.quantize(values, each.type)
        )
        done_bytes += sizes[each.name]
        if progress is not None:
            progress(each.name, done_bytes, total_bytes)
    writer.close()


@dataclass(frozen=True)
class _Source:
    """A file whose tensors have been matched to the parameters of a model."""

    path: Path
    config: Any
    vocabulary: Vocabulary
    architecture: Architecture
    file: GgufFile
    parameters: Mapping[str, jax.ShapeDtypeStruct]
    rules: Sequence[WeightRule]

    @property
    def total_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.parameters.values())

    @classmethod
    def open(cls, path: Path) -> "_Source":
        gguf = _library()
        if not path.is_file():
            files = sorted(each.name for each in path.glob("*.gguf"))  # empty unless it is a directory
            example = f"gguf:{path / files[0]}" if files else "gguf:models/model.gguf"
            problem = "is a directory" if path.is_dir() else "does not exist"
            raise ConversionError(f"gguf:{path}: the file {problem}. Give the path of a file, such as {example}.")
        try:
            file = read_file(gguf, path)
        except (OSError, ValueError) as error:
            raise ConversionError(
                f"{path} is not a complete GGUF file: {type(error).__name__}: {error}. Give a complete file."
            ) from error
        settings, tensors = file.settings, file.tensors
        config, architecture = _config_of(settings, tensors, path)
        rules = architecture.rules(config)
        parameters = named_leaves(abstract_params(config))
        _check(gguf, path, architecture, rules, parameters, tensors)
        return cls(path, config, Vocabulary.read(settings), architecture, file, parameters, rules)

    def quantized(self) -> dict[str, QuantizedMatrix]:
        """Returns the parameters that stay quantized, and warns of quantized types that are read as float32."""
        found, floats = dict[str, QuantizedMatrix](), Counter[str]()
        for rule in self.rules:
            shape = self.parameters[rule.parameter].shape
            names = map(self.architecture.name_of, rule.tensor_shapes(shape))
            types = [self.file.tensors[name].tensor_type.name for name in names]
            if all(each in FORMS for each in types):
                is_tied = rule.parameter == "embedding" and self.config.tie_embeddings
                forms = [FORMS[each] for each in types]
                found[rule.parameter] = matrix_struct(
                    forms, shape, in_rows=rule.transposed or is_tied, is_transposed=is_tied
                )
            else:
                floats.update(each for each in types if each not in _FLOATS)
        if floats:
            counts = ", ".join(f"{count} of type {name}" for name, count in floats.items())
            warnings.warn(
                f"{self.path} has quantized matrices that are read as float32: {counts}. Types that stay quantized: "
                f"{', '.join(FORMS)}, if all layers have such a type.",
                stacklevel=3,
            )
        return found

    def values(self, quantized: Mapping[str, QuantizedMatrix]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """Reads the parameters with their paths, in which indices into lists of modules are integers."""
        for name, leaf in self.leaves(None, quantized):
            yield tuple(int(step) if step.isdigit() else step for step in name.split("/")), leaf

    def leaves(
        self, progress: Progress | None, quantized: Mapping[str, QuantizedMatrix] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Reads the parameters one by one with their paths: float32, or quantized if they are in `quantized`."""
        gguf, heads, done_bytes = _library(), _reordered(self.config), 0
        for rule in self.rules:
            matrix = (quantized or {}).get(rule.parameter)
            leaf = empty_arrays(self.parameters[rule.parameter] if matrix is None else matrix)
            parts = [rule.tensors(array) for array in writable_arrays(leaf)]

            def fill(name: str, matrix: QuantizedMatrix | None = matrix, parts: Any = parts) -> None:
                tensor = self.file.tensors[self.architecture.name_of(name)]
                arrays = [dequantize(gguf, tensor)] if matrix is None else convert(gguf, tensor, matrix)
                for part, array in zip((each[name] for each in parts), arrays, strict=True):
                    values = self.architecture.read(name, array.reshape(part.shape), heads)
                    # In blocks of rows, because a transposed copy of an entire matrix is several times slower.
                    for start in range(0, len(part), _COPIED_ROWS):
                        part[start : start + _COPIED_ROWS] = values[start : start + _COPIED_ROWS]

            with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as threads:
                list(threads.map(fill, parts[0]))
            yield rule.parameter, leaf
            done_bytes += sum(array.nbytes for array in jax.tree.leaves(leaf))
            if progress is not None:
                progress(rule.parameter, done_bytes, self.total_bytes)
        self.file.release_pages()


def _refuse_adapters(address: str, path: Path) -> Adapters:
    raise ConversionError(
        f"The adapters {address} cannot be combined with a GGUF file. Convert it: stack convert gguf:{path} RUN, and "
        "use RUN."
    )


def _config_of(settings: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> tuple[Any, Architecture]:
    """Converts the settings of a file to a model config."""
    name = settings.get("general.architecture")
    # Mixtral has the name of Llama's architecture and differs by its experts.
    mixes = bool(settings.get(f"{name}.expert_count"))
    families = (family for family, each in ARCHITECTURES.items() if (each.name, each.has_experts) == (name, mixes))
    if (family := next(families, None)) is None:
        known = sorted({each.name for each in ARCHITECTURES.values()})
        raise ConversionError(
            f"{path} is of architecture {name!r}; these are read: {', '.join(known)}. "
            "If `stack models` lists its family, open its Hugging Face checkpoint instead (hf:DIR)."
        )
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
    own = {key: value for key, value in own.items() if value or key in _NEEDED}  # expert_count may be 0
    of_family = ARCHITECTURES[family].settings
    _check_settings(own, tuple(of_family.values()), path)
    heads, embed = own["attention.head_count"], own["embedding_length"]
    mapping = {
        "name": family,
        # A file without a tokenizer has the setting only.
        "vocab_size": len(settings.get("tokenizer.ggml.tokens", ())) or own.get("vocab_size"),
        "embed": embed,
        "layers": own["block_count"],
        "heads": heads,
        "kv_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", embed // heads),
        "mlp": own["feed_forward_length"],
        "max_positions": own["context_length"],
        # The shortest decimal of the float32, which is the number in `config.json`: 1e-05 instead of 9.99999974e-06.
        "norm_epsilon": float(np.format_float_positional(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
        "tie_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        "param_dtype": "float32",
        **{field: own[key] for field, key in of_family.items()},
        **({"query_scalar": own.get("attention.key_length", embed // heads)} if family == "gemma3" else {}),
    }
    if own.get("rope.scaling.type", "none") == "linear":
        mapping["rope_scaling"] = {"rope_type": "linear", "factor": float(own["rope.scaling.factor"])}
    try:
        config = parse(registries.models[family].config_class, mapping)
        if ROPE_FREQUENCIES in tensors:
            factors = dequantize(_library(), tensors[ROPE_FREQUENCIES])
            config = replace(config, rope_scaling=_llama3_scaling(config, factors, path))
    except ConfigError as error:
        raise ConversionError(f"{path} describes no valid {family}: {error}") from error
    return config, ARCHITECTURES[family]


_NEEDED = (
    "attention.head_count",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
)
_READ = (
    *_NEEDED,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
)


def _check_settings(settings: Mapping[str, Any], of_family: Sequence[str], path: Path) -> None:
    """Raises a ConversionError if a setting is missing, unknown or not supported by the models."""
    known = (*_READ, *of_family)
    wrong = [f"{key} is missing" for key in (*_NEEDED, *of_family) if key not in settings]
    wrong += [f"{key}={value!r} is not read" for key, value in settings.items() if key not in known]
    if settings.get("rope.scaling.type", "none") not in ("none", "linear"):
        wrong.append(f"rope.scaling.type={settings['rope.scaling.type']!r}, not linear")
    for key in ("attention.value_length", "rope.dimension_count"):
        head_dim = settings.get("attention.key_length", settings.get(key))
        if settings.get(key, head_dim) != head_dim:
            wrong.append(f"{key}={settings[key]}, not the key_length {head_dim}")
    if wrong:
        raise ConversionError(f"{path} has settings that are not read here: {'; '.join(wrong)}.")


def _llama3_scaling(config: Any, factors: np.ndarray, path: Path) -> ops.Llama3Scaling:
    """Returns the RoPE scaling with these divisors, among the scalings of the published Llama 3 models.

    Raises:
      ConversionError: the divisors belong to no such scaling.
    """
    # The largest divisor is the factor if some frequency is low enough; otherwise a published factor may match.
    for factor in sorted({float(np.max(factors)), 8.0, 32.0}):
        scaling = ops.Llama3Scaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
        if np.allclose(_rope_factors(scaling, config), factors, rtol=1e-4):
            return scaling
    raise ConversionError(
        f"{path} divides frequencies by {ROPE_FREQUENCIES} of its own; those of Llama 3.1 to 3.3 are read."
    )


def _check(
    gguf: Any,
    path: Path,
    architecture: Architecture,
    rules: Sequence[WeightRule],
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Mapping[str, Any],
) -> None:
    expected = {
        architecture.name_of(name): shape
        for rule in rules
        for name, shape in rule.tensor_shapes(parameters[rule.parameter].shape).items()
    }
    found = {name: each.shape for name, each in tensors.items()}
    problems = [f"{name} is missing; expected shape {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected and name != ROPE_FREQUENCIES]
    problems += [
        f"{name} has shape {found[name]}; expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    # The package lists the types that it can dequantize only in this private table.
    readable = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, *gguf.quants._type_traits}
    problems += [
        f"{name} is {each.tensor_type.name}, which is not read"
        for name, each in tensors.items()
        if each.tensor_type not in readable
    ]
    if problems:
        raise ConversionError(
            f"The tensors of {path} are not those of its settings ({len(problems)}):\n  "
            + "\n  ".join(sorted(problems))
        )


def _library() -> Any:
    """Imports the `gguf` package.

    Raises:
      ConversionError: the package is not installed.
    """
    try:
        import gguf  # optional dependency
    except ImportError as error:
        raise ConversionError(
            f"GGUF files are read and written by the gguf package: {error}. Install it: "
            f"{install_command('stack-train[gguf]')}"
        ) from error
    return gguf
