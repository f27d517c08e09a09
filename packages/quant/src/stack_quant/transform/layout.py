"""The arrangement of a slice of a parameter as the matrices of a product."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from stack_quant.transform.provenance import Source

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Arrangement of a slice of a parameter as the matrices [batch, d_in, d_out] of a product.

    Attributes:
      shape: shape of the slice.
      split: sizes of all parts of its axes, in order.
      order: parts in the order batch, contracted, kept.
      matrices: shape of the matrices.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    matrices: tuple[int, int, int]

    @classmethod
    def of(
        cls, source: Source, shape: Sequence[int], leading: int, batch: Sequence[int], contracted: Sequence[int]
    ) -> "Layout | None":
        """Returns the layout of a product, or None unless its operand is a complete slice.

        Args:
          shape: shape of the slice.
          leading: number of leading axes of the parameter without an axis in the slice.
          batch, contracted: axes of the operand.
        """
        free = [axis for axis in range(len(source.axes)) if axis not in {*batch, *contracted}]
        groups = [source.parts(axes) for axes in (batch, contracted, free)]
        used = [part for group in groups for part in group if part.size > 1]
        parts = [
            part
            for axis in range(len(shape))
            for part in sorted((one for one in used if one.axis == axis + leading), key=lambda one: -one.stride)
        ]
        sizes = [math.prod(part.size for part in parts if part.axis == axis + leading) for axis in range(len(shape))]
        if source.derived or len(parts) != len(used) or sizes != list(shape) or any(part.cut for part in used):
            return None
        matrices = [math.prod(part.size for part in group) for group in groups]
        return cls(
            tuple(shape),
            tuple(part.size for part in parts),
            tuple(map(parts.index, used)),
            (matrices[0], matrices[1], matrices[2]),
        )

    @classmethod
    def flat(cls, shape: Sequence[int]) -> "Layout":
        """Returns the layout of an array as one row, for algorithms that do not look at the product."""
        return cls(tuple(shape), tuple(shape), tuple(range(len(shape))), (1, 1, math.prod(shape)))

    def arranged(self, array: jax.Array) -> jax.Array:
        """Arranges a slice of the parameter as matrices."""
        return array.reshape(self.split).transpose(self.order).reshape(self.matrices)

    def restored(self, matrices: jax.Array) -> jax.Array:
        """Returns matrices to the axes of the parameter: the inverse of `arranged`."""
        moved = matrices.reshape([self.split[part] for part in self.order])
        return moved.transpose([self.order.index(part) for part in range(len(self.order))]).reshape(self.shape)
