"""Dequantization of GGUF tensors.

The results equal the `gguf` package's, which converts only 16 rows at a time.

Source: the definitions of the block types in ggml (`ggml-common.h`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from stack_train.gguf.reader import StoredTensor

__all__ = ["dequantize", "is_readable"]

_ROWS = 1024
"""Number of blocks that are converted together, which bounds the temporary arrays to the caches of a processor."""


def is_readable(gguf: Any, tensor: StoredTensor) -> bool:
    """Checks whether `dequantize` supports the type of a tensor."""
    # The package lists the types that it can dequantize only in this private table.
    return tensor.tensor_type.name in ("F32", "F16") or tensor.tensor_type in gguf.quants._type_traits


def dequantize(gguf: Any, tensor: StoredTensor) -> np.ndarray:
    """Returns the values of a tensor, float32[shape]."""
    convert = _CONVERTERS.get(tensor.tensor_type.name)
    if convert is None:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape)
    size, size_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(-1, size_bytes)
    values = np.empty((len(blocks), size), np.float32)
    for start in range(0, len(blocks), _ROWS):
        convert(blocks[start : start + _ROWS], values[start : start + _ROWS])
    return values.reshape(tensor.shape)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Returns the float16 number at a byte of each block as float32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _write_nibbles(packed: np.ndarray, values: np.ndarray) -> None:
    """Unpacks 4-bit codes. The low nibbles of a block are its first entries, the high nibbles its last entries."""
    half = packed.shape[1]
    values[:, :half] = packed & np.uint8(15)
    values[:, half:] = packed >> np.uint8(4)


def _q4_0(blocks: np.ndarray, values: np.ndarray) -> None:
    _write_nibbles(blocks[:, 2:], values)
    values -= np.float32(8)
    values *= _halves(blocks, 0)


def _q4_1(blocks: np.ndarray, values: np.ndarray) -> None:
    _write_nibbles(blocks[:, 4:], values)
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)


def _q8_0(blocks: np.ndarray, values: np.ndarray) -> None:
    values[...] = blocks[:, 2:].view(np.int8)
    values *= _halves(blocks, 0)


_CONVERTERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
