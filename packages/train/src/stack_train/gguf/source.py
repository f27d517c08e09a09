"""Reading of the parameters of a GGUF file."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import Progress
from stack_core.chips.machine import usable_cores
from stack_train.checkpoint import named_leaves
from stack_train.gguf.blocks import dequantize, is_readable
from stack_train.gguf.library import library
from stack_train.gguf.names import ROPE_FREQUENCIES, Architecture, reordered_heads
from stack_train.gguf.quantized import FORMS, convert, matrix_struct
from stack_train.gguf.reader import GgufFile, open_file
from stack_train.gguf.settings import config_of
from stack_train.gguf.vocabulary import Vocabulary
from stack_train.models.weight_map import WeightRule
from stack_train.nn.quantized import QuantizedMatrix, empty_arrays, writable_arrays
from stack_train.run.model import abstract_params

__all__ = ["Source"]

_MOST_THREADS = 8

_COPIED_ROWS = 64

_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Source:
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
    def open(cls, path: Path) -> "Source":
        """Opens a file and checks its settings and tensors.

        Raises:
          ConversionError: as `GgufFormat.import_run`.
        """
        gguf = library()
        file = open_file(gguf, path)
        settings, tensors = file.settings, file.tensors
        config, architecture = config_of(settings, tensors, path)
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
        gguf, heads, done_bytes = library(), reordered_heads(self.config), 0
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
    problems += [
        f"{name} is {each.tensor_type.name}, which is not read"
        for name, each in tensors.items()
        if not is_readable(gguf, each)
    ]
    if problems:
        raise ConversionError(
            f"The tensors of {path} are not those of its settings ({len(problems)}):\n  "
            + "\n  ".join(sorted(problems))
        )
