"""Tensors of the Open Inference Protocol: names of dtypes, and values as bytes or as JSON.

Source: https://github.com/kserve/open-inference-protocol, and Triton's extension for binary tensors.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import InferenceError, nearest

__all__ = ["datatype", "dtype_of", "from_bytes", "from_values", "to_values"]

Shape = Sequence[Any]
"""A shape as a client sent it, whose sizes may be anything until they were checked."""

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
_DTYPES = {name: jnp.dtype(dtype) for dtype, name in _DATATYPES.items()}
_SLICE = 2**15
_KINDS = {"b": bool, "u": int, "i": int}


def datatype(dtype: str) -> str:
    """Returns the protocol's name of a dtype, or NumPy's name if the protocol lacks the dtype."""
    return _DATATYPES.get(dtype, dtype)


def dtype_of(name: str, tensor: str) -> np.dtype:
    """Returns the dtype of a protocol name.

    Raises:
      InferenceError: the name is unknown, or the dtype cannot be served (BYTES).
    """
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        message = f"{tensor!r} has the datatype {str(name)[:100]!r}.{nearest(str(name), _DTYPES)} Known: {known}."
        raise InferenceError(message, parameter=tensor)
    return _DTYPES[name]


def from_bytes(tensor: str, name: str, shape: Shape, content: memoryview | bytes) -> np.ndarray:
    """A read-only view of little-endian bytes in row-major order.

    Raises:
      InferenceError: there are more or fewer bytes than the shape needs.
    """
    dtype = dtype_of(name, tensor)
    expected = prod(_checked(tensor, shape)) * dtype.itemsize
    if len(content) != expected:
        message = f"{tensor!r} has {len(content)} bytes; {name}{list(shape)} needs {expected}."
        raise InferenceError(message, parameter=tensor)
    # Other bytes in a bool array have undefined results in NumPy and XLA.
    if dtype == np.bool_ and (np.frombuffer(content, np.uint8) > 1).any():
        raise InferenceError(f"{tensor!r} is BOOL and has bytes that are neither 0 nor 1.", parameter=tensor)
    return np.frombuffer(content, dtype).reshape(shape)


def from_values(tensor: str, name: str, shape: Shape, values: Any) -> np.ndarray:
    """Builds an array from a JSON array, flat or nested.

    Raises:
      InferenceError: the number of values is wrong, or the dtype cannot represent them.
    """
    dtype = dtype_of(name, tensor)
    expected = prod(_checked(tensor, shape))
    if name in ("FP16", "BF16"):
        raise InferenceError(f"{tensor!r} is {name}, which JSON cannot carry. Send it as binary.", parameter=tensor)
    try:
        array = _array(values)
    except (ValueError, TypeError):
        array = np.empty(0, object)
    kind = _KINDS.get(dtype.kind)
    fits = array.dtype.kind in ("biuf" if kind is None else dtype.kind if kind is bool else "iu")
    # NumPy makes floats of an empty list, so its kind is not checked.
    if array.size == 0 == expected:
        return np.empty(shape, dtype)
    if not fits or array.size != expected:
        message = (
            f"{tensor!r} has {array.size} values of the kind {array.dtype.name}; {name}{list(shape)} needs {expected}."
        )
        raise InferenceError(message, parameter=tensor)
    # An overflow becomes infinity, which is reported below.
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if kind is int:
        fits = np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max
    else:
        fits = not (np.isinf(result) & np.isfinite(array)).any()
    if not fits:
        raise InferenceError(f"{tensor!r} has values that {name} cannot hold.", parameter=tensor)
    return result.reshape(shape)


def _array(values: Any) -> np.ndarray:
    """Makes an array of JSON values: integers of up to 64 bits stay integers."""
    if isinstance(values, list) and len(values) > _SLICE and not isinstance(values[0], list):
        # Each slice holds the interpreter for about a millisecond.
        parts = [_array(values[start : start + _SLICE]) for start in range(0, len(values), _SLICE)]
        if any(part.dtype == np.uint64 for part in parts) and all(part.dtype.kind in "iu" for part in parts):
            # `concatenate` would make floats of int64 and uint64.
            parts = [part.astype(np.uint64) if part.min() >= 0 else part for part in parts]
        return np.concatenate(parts)
    array = np.array(values)
    if array.dtype == np.float64 and array.size and np.max(array) >= 2.0**63:
        exact = np.array(values, dtype=object)  # NumPy makes floats of [1, 2**63]
        if all(type(value) is int and 0 <= value < 2**64 for value in exact.flat):
            return exact.astype(np.uint64)
    return array


def to_values(array: np.ndarray) -> np.ndarray:
    """Returns flat values that orjson writes; BF16 and FP16 become FP32."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else flat


def _checked(tensor: str, shape: Shape) -> Shape:
    # In Python, booleans are integers.
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**40 for size in shape):
        raise InferenceError(f"{tensor!r} has the shape {list(shape)!r}; sizes are integers >= 0.", parameter=tensor)
    return shape
