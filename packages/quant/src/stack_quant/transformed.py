"""Quantized matrices whose inputs are transformed before the product: by a scale per input, or by a rotation.

For a product y = x W, a transform T with y = T(x) Q makes either factor easier to round:

    T(x) = R (x / s),  Q = R (s W),  W = R Q / s

s: a positive number for each input; R: the orthonormal Hadamard matrix of each block of inputs, R = R^T = R^-1.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.ops import QView
from stack_quant.packing import stored_bytes
from stack_quant.qtypes import QType
from stack_quant.tiling import spread

__all__ = ["InputSpec", "TransformedArray", "hadamard"]


@dataclass(frozen=True)
class InputSpec:
    """The form of the transform of a parameter's inputs.

    Attributes:
      scale_shape: shape of s, with one entry along the axes that a product keeps; None without scales.
      axis: axis of the parameter that is rotated, counted from the end.
      block: number of entries of a block of the rotation; 1 without a rotation.
    """

    scale_shape: tuple[int, ...] | None
    axis: int
    block: int

    def of_slice(self, leading: int) -> "InputSpec":
        """Returns the form for a slice without the leading axes."""
        return dataclasses.replace(self, scale_shape=None if self.scale_shape is None else self.scale_shape[leading:])

    def plain(self, base: Any) -> "TransformedArray":
        """Returns an array with scales of 1, for shapes and for codes that were not chosen by an algorithm."""
        scale = None if self.scale_shape is None else jnp.ones(self.scale_shape, jnp.float32)
        return TransformedArray(base, scale, self.axis, self.block)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransformedArray:
    """A quantized array Q with the transform T of its inputs. Its dequantized value is R Q / s.

    Invariants:

        scale.shape[i] in (1, shape[i])
        shape[axis] % block == 0

    Attributes:
      base: Q, a quantized array.
      scale: float32 factors 1 / s, or None.
      axis: axis that is rotated, counted from the end.
      block: number of entries of a block of the rotation, a power of two; 1 without a rotation.
    """

    base: Any
    scale: Any
    axis: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def qtype(self) -> QType:
        return self.base.qtype

    @property
    def nbytes(self) -> int:
        """Size of all leaves in bytes, with codes of less than a byte in packed form."""
        return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(self))

    @property
    def scheme(self) -> str:
        """Description for messages, such as "int4/t128 scaled" or "int8 rotated by 64"."""
        scaled = "" if self.scale is None else " scaled"
        return f"{self.base.scheme}{scaled}{f' rotated by {self.block}' if self.block > 1 else ''}"

    def __getitem__(self, index: Any) -> jax.Array:
        """Returns dequantized entries."""
        return ops.dequantize(self, self.dtype)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the dequantized array for NumPy, always a copy."""
        return np.asarray(ops.dequantize(self, self.dtype), dtype)

    def __jax_array__(self) -> jax.Array:
        return ops.dequantize(self, self.dtype)

    def __stack_qview__(self) -> QView:
        """Returns the view for code that does not transform the inputs: dequantized values if there is a rotation."""
        if self.block > 1:
            values = self.restored(ops.dequantize(self.base, jnp.float32))
            assert values is not None, "the array covers its own axes"
            return QView((1, 0), values, jnp.ones((1,) * self.ndim, jnp.float32), None, self.scheme, None)
        view: QView = self.base.__stack_qview__()
        tiles = [math.lcm(*sizes) for sizes in zip(view.scale.shape, self.scale.shape, strict=True)]
        zero = None if view.zero_point is None else spread(view.zero_point, tuple(tiles))
        scale = spread(view.scale, tuple(tiles)) * spread(self.scale, tuple(tiles))
        return dataclasses.replace(view, scale=scale, zero_point=zero, scheme=self.scheme)

    def restored(self, values: jax.Array, axes: Mapping[int, int] | None = None) -> jax.Array | None:
        """Computes R values / s for values of Q, or for a part of them with the axes of `inputs`."""
        axes = {axis: axis for axis in range(self.ndim)} if axes is None else axes
        return self._scaled(self._rotated(values, axes), axes) if self._covers(axes) else None

    def inputs(self, x: jax.Array, axes: Mapping[int, int]) -> jax.Array | None:
        """Computes T(x) in float32, with a result of the dtype of x.

        Args:
          axes: axis of x for each axis of the array that both have in common, such as contracted axes.

        Returns:
          T(x), or None if scales or blocks extend along further axes.
        """
        if not self._covers(axes):
            return None
        return self._rotated(self._scaled(x.astype(jnp.float32), axes), axes).astype(x.dtype)

    def _covers(self, axes: Mapping[int, int]) -> bool:
        sizes = () if self.scale is None else self.scale.shape
        used = {axis for axis, size in enumerate(sizes) if size > 1} | ({self._place} if self.block > 1 else set())
        return used <= axes.keys()

    @property
    def _place(self) -> int:
        return self.axis % self.ndim

    def _rotated(self, values: jax.Array, axes: Mapping[int, int]) -> jax.Array:
        return hadamard(values, axes[self._place], self.block) if self.block > 1 else values

    def _scaled(self, values: jax.Array, axes: Mapping[int, int]) -> jax.Array:
        if self.scale is None:
            return values
        # Axes of the array in the order of the axes of the values; others have one entry.
        order = sorted(axes, key=lambda axis: axes[axis])
        rest = [axis for axis in range(self.ndim) if axis not in axes]
        sizes = [1] * values.ndim
        for axis in order:
            sizes[axes[axis]] = self.scale.shape[axis]
        return values * self.scale.transpose([*order, *rest]).reshape(sizes)

    def transposed(self, base: Any, permutation: Sequence[int]) -> "TransformedArray":
        """Returns the array with transposed axes, given the transposed Q."""
        axis = tuple(permutation).index(self._place) - self.ndim
        scale = None if self.scale is None else self.scale.transpose(permutation)
        return TransformedArray(base, scale, axis, self.block)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def hadamard(array: jax.Array, axis: int, block: int) -> jax.Array:
    """Multiplies blocks along an axis by the orthonormal Hadamard matrix of their size, a power of two.

    A block has two axes, of at most 64 entries each for blocks of up to 4096, and a dense matrix multiplies each axis.
    This suits matrix units, and writes no butterfly of slices to memory.
    """
    if block == 1:
        return array
    first = 1 << (block.bit_length() - 1) // 2
    moved = jnp.moveaxis(array, axis, -1)
    split = moved.reshape(*moved.shape[:-1], -1, first, block // first)
    for place, size in ((-2, first), (-1, block // first)):
        matrix = jnp.asarray(_hadamard_matrix(size), array.dtype)
        split = jnp.moveaxis(jnp.tensordot(split, matrix, (place, 0), precision="highest"), -1, place)
    return jnp.moveaxis(split.reshape(moved.shape), -1, axis)


def _hadamard_matrix(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
