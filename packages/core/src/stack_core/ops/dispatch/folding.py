"""Folding of the mapped axis of `jax.vmap` into an axis of an op."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.ops.dispatch.op import symbols

__all__ = ["Folding"]


@dataclass(frozen=True)
class Folding:
    """Folding of a mapped axis of `size` into the op's axis `into` ("..." or a name) with `own` entries per example.

    Arrays are mapped along their first axis. Folding into "..." leaves them unchanged.
    """

    size: int
    into: str
    own: int

    @classmethod
    def of(cls, size: int, into: str | None, axes: Sequence[str | None], shapes: Sequence[Any]) -> "Folding | None":
        """Returns the folding of a call, or None if `into` is None.

        Args:
          size: size of the mapped axis.
          into: `Op.folds`.
          axes: axes of each operand.
          shapes: shapes of one example of each operand.
        """
        if into is None:
            return None
        # An operand with size 1 along the axis is broadcast, so the maximum is the size of one example.
        own = 1
        for of_one, shape in zip(axes, shapes, strict=True):
            if of_one is not None and into in of_one.split() and into != "...":
                own = max(own, shape[symbols(of_one, len(shape)).index(into)])
        return cls(size, into, own)

    def has(self, axes: str | None) -> bool:
        """Returns whether an array has the folded axis."""
        return axes is not None and self.into in axes.split()

    def shape(self, axes: str | None, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the folded array from the shape of an example."""
        if not self.has(axes):
            return tuple(shape)
        if self.into == "...":
            return (self.size, *shape)
        at = self._at(axes, len(shape))
        return (*shape[:at], shape[at] * self.size, *shape[at + 1 :])

    def fold(self, axes: str | None, array: Any, is_mapped: bool) -> Any:
        """Returns the folded array, or None if it cannot be folded."""
        if not self.has(axes):
            return None if is_mapped else array
        at = 0 if self.into == "..." else self._at(axes, array.ndim - is_mapped)
        if self.into != "..." and array.shape[at + is_mapped] != self.own:  # size 1, broadcast along the axis
            return None if is_mapped else array
        # All examples share the operand: copies along the folded axis give each its rows.
        if not is_mapped:
            array = jnp.broadcast_to(array, (self.size, *array.shape))
        if self.into == "...":
            return array
        # [examples, ..., own, ...] -> [..., examples, own, ...] -> [..., examples * own, ...].
        moved = jnp.moveaxis(array, 0, at)
        return moved.reshape(*moved.shape[:at], moved.shape[at] * moved.shape[at + 1], *moved.shape[at + 2 :])

    def unfold(self, axes: str, array: Any) -> Any:
        """Inverts `fold`; the result is mapped along its first axis."""
        if self.into == "...":
            return array
        at = self._at(axes, array.ndim)
        # -1 is ambiguous for empty arrays.
        split = array.reshape(*array.shape[:at], self.size, array.shape[at] // self.size, *array.shape[at + 1 :])
        return jnp.moveaxis(split, at, 0)

    def fold_all(self, axes: Sequence[str | None], arrays: Sequence[Any], mapped: Sequence[bool]) -> list[Any] | None:
        """Folds all arrays; returns None if any of them cannot be folded."""
        found = [self.fold(*one) for one in zip(axes, arrays, mapped, strict=True)]
        return None if any(array is None for array in found) else found

    def struct(self, axes: str | None, struct: Any) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of the folded array."""
        return jax.ShapeDtypeStruct(self.shape(axes, struct.shape), struct.dtype)

    def names(self, axes: Any, names: Sequence[str | None]) -> tuple[str | None, ...]:
        """Returns the logical axis names of a folded array, with None for the folded axis."""
        if not isinstance(axes, str) or not self.has(axes):
            return tuple(names)
        if self.into == "...":
            return (None, *names)
        at = self._at(axes, len(names))
        return (*names[:at], None, *names[at + 1 :])

    def _at(self, axes: str | None, rank: int) -> int:
        assert axes is not None
        return symbols(axes, rank).index(self.into)
