"""Conversion of GGUF blocks to `QuantizedMatrix`, without a float copy of the weights.

An entry q of a block with scale d and minimum m stands for d (q - center), or d q - m if the type has minima. It
becomes (code - zero_point) * scale with code = q - center, scale = d and zero_point = m / d - center. Codes and scales
are exact. Zero points are quotients rounded to float32, which changes a weight by about 1e-7 of m.

Source: the definitions of the block types in ggml (`ggml-common.h` and `ggml-quants.c`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_train.gguf.reader import StoredTensor
from stack_train.nn.quantized import QuantizedMatrix

__all__ = ["FORMS", "Form", "convert", "matrix_struct"]

_ROWS = 1024
"""Number of blocks that are converted together, which bounds the temporary arrays to the caches of a processor."""

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Entries q, uint8 or int8[blocks, size]; scales d, float32[blocks, tiles]; and minima m of their shape, or None."""


@dataclass(frozen=True)
class Form:
    """The form in which a type of GGUF is stored in a `QuantizedMatrix`.

    Attributes:
      name: name of the type.
      bits: number of bits of a code, 4 or 8.
      tile: number of entries with one scale.
      center: number that is subtracted from entries.
      has_minima: True if tiles have minima, which become zero points.
      unpack: function of the bytes of blocks, uint8[blocks, bytes].
    """

    name: str
    bits: int
    tile: int
    center: int
    has_minima: bool
    unpack: Callable[[np.ndarray], Unpacked]


def matrix_struct(forms: Sequence[Form], shape: tuple[int, ...], *, in_rows: bool, is_transposed: bool) -> Any:
    """Returns the shapes and dtypes of a parameter, a `QuantizedMatrix` of `jax.ShapeDtypeStruct`.

    Layers of several types get the widest codes and the smallest tiles among them, and zero points if any has minima.

    Args:
      forms: forms of the parameter's tensors.
      shape: logical shape.
      in_rows: True if a tile is a part of a column of the codes, instead of a row.
      is_transposed: see `QuantizedMatrix`.
    """
    *stack, rows, columns = shape
    shape = (*stack, columns, rows) if is_transposed else shape
    tiles, axis = list(shape), -2 if in_rows else -1
    tiles[axis] //= min(form.tile for form in forms)
    bits = max(form.bits for form in forms)
    codes = jax.ShapeDtypeStruct(shape, jnp.int4 if bits == 4 else jnp.int8)
    scale = jax.ShapeDtypeStruct(tuple(tiles), jnp.float32)
    zero_point = scale if any(form.has_minima for form in forms) else None
    return QuantizedMatrix(codes, scale, zero_point, "+".join(sorted({form.name for form in forms})), is_transposed)


def convert(gguf: Any, tensor: StoredTensor, matrix: QuantizedMatrix) -> list[np.ndarray]:
    """Converts a tensor to the arrays of a `QuantizedMatrix`, in the layout of the file.

    Args:
      matrix: matrix whose parts the arrays become; determines the size of the tiles.

    Returns:
      codes int8[..., entries], scales float32[..., tiles], and zero points of the same shape for asymmetric matrices.
    """
    form = FORMS[tensor.tensor_type.name]
    size, size_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(-1, size_bytes)
    codes = np.empty((len(blocks), size), np.int8)
    scale = np.empty((len(blocks), size // form.tile), np.float32)
    zero_point = np.zeros_like(scale)
    for start in range(0, len(blocks), _ROWS):
        part = slice(start, start + _ROWS)
        entries, scale[part], minima = form.unpack(blocks[part])
        np.subtract(entries.view(np.int8), np.int8(form.center), out=codes[part])
        if minima is not None:
            zero_point[part] = _zero_points(codes[part], scale[part], minima, form.center)
    tile = matrix.codes.size // matrix.scale.size
    parts = [scale] if matrix.zero_point is None else [scale, zero_point]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // tile)
    return [codes.reshape(tensor.shape), *(np.repeat(each, form.tile // tile, axis=1).reshape(shape) for each in parts)]


def _zero_points(codes: np.ndarray, scale: np.ndarray, minima: np.ndarray, center: int) -> np.ndarray:
    """Returns the zero points of tiles. In tiles with scale 0, all entries equal -m: their codes and scales are set."""
    if (is_flat := scale == 0).any():
        codes.reshape(*scale.shape, -1)[is_flat] = 0
        scale[is_flat] = 1
    return minima / scale - np.where(is_flat, np.float32(0), np.float32(center))


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Returns the float16 number at a byte of each block as float32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fields(packed: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Unpacks fields of `bits` bits from groups of bytes; the lowest fields of a group are its first entries."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, group) >> shifts & np.uint8(2**bits - 1)
    return fields.reshape(len(packed), -1)


def _high_bits(packed: np.ndarray) -> np.ndarray:
    """Returns the fifth bit of the 32 entries of each block, uint8[blocks, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return _fields(blocks[:, 2:], 4, 16), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Unpacked:
    return _fields(blocks[:, 6:], 4, 16) | _high_bits(blocks[:, 2:6]) << 4, _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> Unpacked:
    return _fields(blocks[:, 8:], 4, 16) | _high_bits(blocks[:, 4:8]) << 4, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return np.ascontiguousarray(blocks[:, 2:]), _half(blocks, 0), None


def _q2_k(blocks: np.ndarray) -> Unpacked:
    scales = blocks[:, :16]
    return _fields(blocks[:, 16:80], 2, 32), _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)


def _q3_k(blocks: np.ndarray) -> Unpacked:
    # Scales of 6 bits: 16 low halves in 8 bytes, then 16 high pairs in 4 bytes.
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    entries = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return entries, _half(blocks, 108) * (scales.astype(np.int8) - np.int8(32)), None


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and minima, float32[blocks, 8], of types that store them with 6 bits after two halves."""
    low, middle, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, mixed >> 4 | middle >> 6 << 4], axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: np.ndarray) -> Unpacked:
    return _fields(blocks[:, 16:], 4, 32), *_scales_and_minima(blocks)


def _q5_k(blocks: np.ndarray) -> Unpacked:
    entries = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return entries, *_scales_and_minima(blocks)


def _q6_k(blocks: np.ndarray) -> Unpacked:
    entries = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return entries, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


FORMS = {
    form.name: form
    for form in (
        Form("Q4_0", 4, 32, 8, False, _q4_0),
        Form("Q4_1", 4, 32, 8, True, _q4_1),
        Form("Q5_0", 8, 32, 16, False, _q5_0),
        Form("Q5_1", 8, 32, 0, True, _q5_1),
        Form("Q8_0", 8, 32, 0, False, _q8_0),
        Form("Q2_K", 4, 16, 0, True, _q2_k),
        Form("Q3_K", 4, 16, 4, False, _q3_k),
        Form("Q4_K", 4, 32, 8, True, _q4_k),
        Form("Q5_K", 8, 32, 0, True, _q5_k),
        Form("Q6_K", 8, 16, 32, False, _q6_k),
    )
}
"""Forms by the name of the type. Entries of 5 and 6 bits are stored with 8 bits, those of 2 and 3 bits with 4."""
