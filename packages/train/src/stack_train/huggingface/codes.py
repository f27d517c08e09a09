"""Matrices of quantized checkpoints: codes with scales, dequantized one tensor at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.models.reader import Reader
from stack_train.safetensors_files import StoredTensor

__all__ = [
    "Codes",
    "Coding",
    "Form",
    "QuantizedTensor",
    "check_read",
    "fp4_pairs",
    "fp4_values",
    "is_positive",
    "pack_words",
    "problem_of",
    "unpack_words",
]

# E2M1; the highest bit of a code is the sign.
_FP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_VALUES = np.concatenate([_FP4_VALUES, -_FP4_VALUES]).astype(ml_dtypes.bfloat16)
_WORD_BITS, _BYTE_BITS = 32, 8


@dataclass(frozen=True)
class Codes:
    """A quantized matrix in torch's layout [d_out, d_in].

        w[i, j] = (values[i, j] - zero_point[i, g]) * scale[i, g],  g = group_of[j]

    Attributes:
      values: integers or small floats, [d_out, d_in].
      scale: float32[d_out or 1, groups].
      zero_point: integers of the shape of `scale`; None for symmetric schemes.
      group_of: group of each input, int[d_in]; None for equal groups of adjacent inputs.
    """

    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None
    group_of: np.ndarray | None = None

    def dequantized(self, dtype: Any) -> np.ndarray:
        """Computes the matrix in float32 and rounds it once to `dtype`."""
        values = self.values.astype(np.float32)
        if self.zero_point is not None:
            values -= self._per_input(self.zero_point.astype(np.float32))
        values *= self._per_input(self.scale)
        return values.astype(dtype, copy=False)

    def arrays(self) -> list[np.ndarray]:
        """Returns codes, scales and, if there are any, zero points in float32; scales have a row for each output."""
        shape = (self.values.shape[0], self.scale.shape[1])
        factors = [self.scale] if self.zero_point is None else [self.scale, self.zero_point.astype(np.float32)]
        return [self.values, *(np.broadcast_to(factor, shape) for factor in factors)]

    def _per_input(self, factor: np.ndarray) -> np.ndarray:
        if self.group_of is not None:
            return factor[:, self.group_of]
        return factor if factor.shape[1] == 1 else np.repeat(factor, self.values.shape[1] // factor.shape[1], 1)


@dataclass(frozen=True)
class Form:
    """The form in which a model keeps a quantized matrix.

    Attributes:
      dtype: dtype of the codes: int4, int8 or float8_e4m3fn.
      groups: number of groups of inputs, each a run of adjacent inputs.
      has_zero_points: True if groups have zero points.
    """

    dtype: str
    groups: int
    has_zero_points: bool


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A matrix in codes, presented as a float tensor [d_out, d_in].

    Attributes:
      scheme: description, such as "int4, groups of 32", for messages.
      decode: reads the codes and scales.
      form: form in which a model stores the matrix; None for a matrix that must be dequantized.
    """

    scheme: str
    decode: Callable[[], Codes]
    form: Form | None = None

    def read(self) -> np.ndarray:
        return self.decode().dequantized(self.numpy_dtype)


@dataclass(frozen=True)
class Coding:
    """The tensors of a quantized checkpoint, presented as a float checkpoint.

    Attributes:
      tensors: tensors by name; matrices in codes are dequantized when they are read.
      unapplied: descriptions of what the checkpoint prescribes for activations and caches, which stay in float.
    """

    tensors: Mapping[str, StoredTensor]
    unapplied: tuple[str, ...] = ()


def check_read(reader: Reader, place: str) -> None:
    """Raises a ConversionError if a section has a setting that is not supported, or a key that was not read."""
    if wrong := [*reader.problems, *reader.unread()]:
        raise ConversionError(
            f"{place} of config.json has settings that are not supported: {'; '.join(wrong)}. Convert the original "
            "float checkpoint, or delete a key that does not change the stored weights."
        )


def problem_of(name: str, tensor: StoredTensor | None, dtypes: Sequence[str], shape: Sequence[int]) -> str | None:
    """Describes a missing tensor or its unexpected dtype or shape; returns None for a valid tensor."""
    if tensor is not None and tensor.dtype in dtypes and tensor.shape == tuple(shape):
        return None
    there = "is missing" if tensor is None else f"is {tensor.dtype}{list(tensor.shape)}"
    return f"{name} {there}; expected {' or '.join(dtypes)}{list(shape)}"


def is_positive(number: Any) -> bool:
    """Returns whether a value of a config file is a positive integer."""
    return isinstance(number, int) and number > 0


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks `count` unsigned codes of 2, 4 or 8 bits from the last axis of int32 words, from the lowest bits up."""
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    parts = (octets[..., None] >> np.arange(0, _BYTE_BITS, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    return parts.reshape(*words.shape[:-1], -1)[..., :count]


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs unsigned codes along the last axis into int32 words: the inverse of `unpack_words`, padded with zeros."""
    padding = -codes.shape[-1] % (_WORD_BITS // bits)
    padded = np.pad(codes.astype(np.uint8), [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    parts = padded.reshape(*codes.shape[:-1], -1, _BYTE_BITS // bits)
    octets = np.bitwise_or.reduce(parts << np.arange(0, _BYTE_BITS, bits, dtype=np.uint8), -1)
    return np.ascontiguousarray(octets).view("<i4")


def fp4_values(pairs: np.ndarray) -> np.ndarray:
    """Decodes bytes with two 4-bit floats (E2M1) each, the first in the low bits, along the last axis, to bfloat16."""
    return _FP4_VALUES[np.stack([pairs & 0xF, pairs >> 4], -1)].reshape(*pairs.shape[:-1], -1)


def fp4_pairs(values: np.ndarray) -> np.ndarray:
    """Encodes 4-bit floats (E2M1) as bytes: the inverse of `fp4_values`."""
    numbers = values.astype(np.float32)
    codes = np.searchsorted(_FP4_VALUES[:8].astype(np.float32), np.abs(numbers)).astype(np.uint8)
    codes |= np.signbit(numbers).astype(np.uint8) << np.uint8(3)
    return codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
