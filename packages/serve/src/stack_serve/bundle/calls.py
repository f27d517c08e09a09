"""Calls of a signature: checks of their inputs, and padding or splitting to the sizes of the exported programs."""

from collections.abc import Mapping, Sequence

import numpy as np

from stack_core.abi.errors import InferenceError
from stack_serve.bundle.manifest import BATCH, Signature, TensorSpec

__all__ = ["check", "cropped", "fitted", "size_for", "split"]

Arrays = Mapping[str, np.ndarray]


def check(signature: Signature, inputs: Arrays) -> dict[str, int]:
    """Checks the inputs of a call and returns the sizes of the named axes.

    Raises:
      InferenceError: the signature lacks a name, dtype, shape or size; lists what it has.
    """
    sizes: dict[str, int] = {}
    for name in inputs.keys() ^ {spec.name for spec in signature.inputs}:
        what = "is not an input" if name in inputs else "is missing"
        raise _error(signature, f"{name!r} {what}", name)
    for spec in signature.inputs:
        array = inputs[spec.name]
        if array.dtype.name != spec.dtype:
            raise _error(signature, f"{spec.name!r} has the dtype {array.dtype.name}", spec.name)
        if array.ndim != len(spec.shape):
            raise _error(signature, f"{spec.name!r} has the shape {list(array.shape)}", spec.name)
        for axis, size in zip(spec.shape, array.shape, strict=True):
            # The first tensor with a named axis determines the size for all further tensors.
            wanted = sizes.setdefault(axis, size) if isinstance(axis, str) else axis
            if size != wanted:
                raise _error(signature, f"{spec.name!r} has the shape {list(array.shape)}", spec.name)
    for axis, size in sizes.items():
        _check_size(signature, axis, size)
    return sizes


def split(signature: Signature, rows: int) -> list[int]:
    """Splits rows into calls of at most the largest size; returns the number of rows of each."""
    largest = signature.sizes[BATCH][-1]
    return [largest] * (rows // largest) + ([rows % largest] if rows % largest else [])


def size_for(signature: Signature, axis: str, size: int) -> int:
    """The smallest size of an axis that has room."""
    return next(known for known in signature.sizes[axis] if known >= size)


def fitted(signature: Signature, inputs: Arrays, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """The inputs in order, padded at the end of named axes up to `sizes`."""
    return [_padded(spec, inputs[spec.name], sizes, signature.pad) for spec in signature.inputs]


def cropped(specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Arrays without what padding added."""
    return [array[tuple(slice(size) for size in spec.at(sizes))] for spec, array in zip(specs, arrays, strict=True)]


def _padded(spec: TensorSpec, array: np.ndarray, sizes: Mapping[str, int], pad: Mapping[str, float]) -> np.ndarray:
    shape = spec.at(sizes)
    if array.shape == shape:
        return array
    # Without a pad value only the batch grows, and the results of its additional rows are cropped.
    fill = next((pad[axis] for axis in spec.shape if axis in pad), 0)
    result = np.full(shape, fill, array.dtype)
    result[tuple(slice(size) for size in array.shape)] = array
    return result


def _check_size(signature: Signature, axis: str, size: int) -> None:
    known = signature.sizes[axis]
    splits = axis == BATCH and signature.joins and size > 0
    if not (splits or size in known or (axis in signature.pad and 0 < size <= known[-1])):
        raise _error(signature, f"the axis {axis!r} has the size {size}", axis)


def _error(signature: Signature, problem: str, parameter: str) -> InferenceError:
    return InferenceError(f"The input does not fit: {problem}. Expected {signature}.", parameter=parameter)
