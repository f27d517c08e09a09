"""Matrices of quantized checkpoints, which products and lookups take without a float copy."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from stack_core.abi.ops import QView
from stack_core.ops.building import is_quantized, take

__all__ = ["QuantizedMatrix", "empty_arrays", "read_weight", "with_quantized", "writable_arrays"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix or a stack of matrices, as a pytree that stacks and slices like an array.

    The stored matrix is `(codes - zero_point) * scale`, where each scale and zero point is repeated over its tile.

    Invariants: `codes.shape[i] % scale.shape[i] == 0`, and `zero_point` is None or has the shape of `scale`.

    Attributes:
      codes: int4, int8 or float8_e4m3fn, [..., rows, columns].
      scale: float32, [..., row_tiles, column_tiles].
      zero_point: float32 code of the value 0 in each tile; None represents zeros.
      type: name of the type in the checkpoint, for messages.
      is_transposed: True if the value is the transposed stored matrix. A tied embedding is stored as the head's weight,
        [embed, vocab], because transposing it would take longer than the product.
    """

    codes: Any  # Any, as JAX also builds this pytree from shapes, axes and shardings
    scale: Any
    zero_point: Any
    type: str = dataclasses.field(metadata={"static": True})
    is_transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        *stack, rows, columns = self.codes.shape
        return (*stack, columns, rows) if self.is_transposed else self.codes.shape

    @property
    def T(self) -> "QuantizedMatrix":  # noqa: N802, the name of NumPy and JAX
        """The transposed matrix, without a copy."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def rows(self, indices: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the rows at `indices` of one matrix, [*indices, columns], in `dtype`; only they are dequantized.

        Indices out of range select the first or last row.
        """
        if self.is_transposed:
            return jnp.moveaxis(take(self.T, indices, 1, dtype), 0, -1)
        return take(self, indices, 0, dtype)

    def __stack_qview__(self) -> QView:
        codes, scale, zero_point = self.codes, self.scale, self.zero_point
        if self.is_transposed:
            codes, scale, zero_point = jax.tree.map(lambda part: jnp.swapaxes(part, -1, -2), (codes, scale, zero_point))
        return QView((1, 0), codes, scale, zero_point, self.type)


def read_weight(variable: Any, dtype: DTypeLike | None = None) -> Any:
    """Returns the value of a variable for an op that also takes quantized arrays.

    Args:
      dtype: dtype to which an array is cast; None keeps its dtype. Quantized values are returned unchanged.
    """
    value = variable.get_value()
    if is_quantized(value):
        return value
    return variable[...] if dtype is None else variable[...].astype(dtype)


def with_quantized(model: Any, quantized: Mapping[str, QuantizedMatrix]) -> Any:
    """Sets the quantized parameters of an abstract model, by path, and returns the model."""
    for path, variable in nnx.iter_graph(model):
        if (matrix := quantized.get("/".join(map(str, path)))) is not None:
            *stack, rows, columns = variable.get_metadata()["logical_axes"]
            axes = (*stack, columns, rows) if matrix.is_transposed else (*stack, rows, columns)
            variable.set_value(matrix)
            variable.set_metadata(logical_axes=axes)
    return model


def empty_arrays(tree: Any) -> Any:
    """Returns uninitialized NumPy arrays for the structs of a tree."""
    return jax.tree.map(lambda each: np.empty(each.shape, each.dtype), tree)


def writable_arrays(leaf: Any) -> list[np.ndarray]:
    """Returns the arrays of a parameter in its logical layout, as writable views; int4 codes are viewed as int8."""
    arrays = [array.view(np.int8) if array.dtype == jnp.int4 else array for array in jax.tree.leaves(leaf)]
    is_transposed = isinstance(leaf, QuantizedMatrix) and leaf.is_transposed
    return [array.swapaxes(-1, -2) for array in arrays] if is_transposed else arrays
