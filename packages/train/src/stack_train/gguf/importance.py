"""Importance of the columns of matrices: the mean square of each input of their products.

Source: the files of `stack quantize --importance`, and llama.cpp's importance matrices in GGUF (`tools/imatrix`).
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.gguf.blocks import dequantize
from stack_train.gguf.reader import MAGIC, read_file
from stack_train.models.weight_map import WeightRule

__all__ = ["Importance"]

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Importance:
    """The contents of a file with the mean squared inputs of matrices.

    Attributes:
      path: path of the file.
      of_parameters: mean squared inputs by the model's parameter, with one entry along the axes of outputs.
      of_tensors: mean squared inputs by the name of a tensor in GGUF, float32[..., 1, d_in].
    """

    path: Path
    of_parameters: Mapping[str, np.ndarray] = field(default_factory=dict)
    of_tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, gguf: Any, path: Path) -> "Importance":
        """Reads a file.

        Raises:
          ConversionError: the file does not exist, has another format, or contains invalid numbers.
        """
        try:
            with path.open("rb") as file:
                is_gguf = file.read(len(MAGIC)) == MAGIC
            found = cls(path, of_tensors=_means(gguf, path)) if is_gguf else cls(path, of_parameters=_arrays(path))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConversionError(
                f"{path} has no importance of columns: {type(error).__name__}: {error}. Give a file written by "
                "`stack quantize RUN --importance --out FILE`, or an imatrix of llama.cpp in GGUF."
            ) from error
        for name, array in (*found.of_parameters.items(), *found.of_tensors.items()):
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise ConversionError(f"{path}: {name} has negative or infinite numbers or NaN. Measure it again.")
        return found

    def of(self, rule: WeightRule, tensor: str, gguf_name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns the importance of a tensor's columns, float32[..., 1, d_in], or None if the file does not have it.

        Args:
          rule: location of the parameter.
          tensor: name of the tensor in Hugging Face checkpoints.
          gguf_name: name of the tensor in GGUF.
          shape: shape of the parameter.

        Raises:
          ConversionError: the file has another number of columns.
        """
        if (array := self.of_parameters.get(rule.parameter)) is not None:
            self._used.add(rule.parameter)
            if array.ndim != len(shape) or not all(
                size in (1, full) for size, full in zip(array.shape, shape, strict=True)
            ):
                raise self._other_model(rule.parameter, array.shape, shape)
            # One entry along the first axes would stand for all layers and experts.
            leading = shape[: max(len(shape) - 2, 0)]
            return rule.tensors(np.broadcast_to(array, (*leading, *array.shape[len(leading) :])))[tensor]
        if (array := self.of_tensors.get(gguf_name)) is not None:
            self._used.add(gguf_name)
            full = next(iter(rule.tensor_shapes(shape).values()))
            found, expected = (tuple(each[:-2]) + tuple(each[-1:]) for each in (array.shape, full))
            if found != expected:
                raise self._other_model(gguf_name, found, expected)
        return array

    def check_used(self) -> None:
        """Raises a ConversionError if no tensor had an importance."""
        if not self._used:
            names = ", ".join([*self.of_parameters, *self.of_tensors][:3])
            raise ConversionError(
                f"{self.path} has no importance of a quantized tensor of this model; it has: {names}."
            )

    def _other_model(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ConversionError:
        return ConversionError(
            f"{self.path}: {name} has the importance of {list(found)} columns, and the model has {list(expected)}. "
            "Measure the importance of this model."
        )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return {name: np.asarray(stored[name], np.float32) for name in stored.files}


def _means(gguf: Any, path: Path) -> dict[str, np.ndarray]:
    tensors = read_file(gguf, path).tensors
    means = {}
    for name in tensors:
        if name.endswith(_SUMS):
            matrix = name.removesuffix(_SUMS)
            # [experts, d_in] and [experts, 1]; without experts the first axis has one entry or is absent.
            sums = np.atleast_2d(dequantize(gguf, tensors[name]))
            counts = dequantize(gguf, tensors[matrix + _COUNTS]).reshape(-1, 1)
            mean = sums / np.maximum(counts, 1)
            means[matrix] = mean[:, None] if len(mean) > 1 else mean
    if not means:
        raise ValueError(f"no tensor is named *{_SUMS}")
    return means
