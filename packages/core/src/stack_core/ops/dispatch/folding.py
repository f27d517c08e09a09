"""A call under `jax.vmap`: the mapped axis becomes a part of one of the op's own axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.ops.dispatch.op import symbols

__all__ = ["Folding"]


@dataclass(frozen=True)
class Folding:
    """Puts a mapped axis of `size` into the op's axis `into`, "..." or a name, which has `own` entries in each example.

    Arrays are mapped along their first axis. Along "..." they stay as they are.
    """

    size: int
    into: str
    own: int

    @classmethod
    def of(cls, size: int, into: str | None, axes: Sequence[str | None], shapes: Sequence[Any]) -> "Folding | None":
        """None if the op folds nothing.

        Args:
          axes: of the operands.
          shapes: of one example.
        """
        if into is None:
            return None
        own = 1
        for of_one, shape in zip(axes, shapes, strict=True):
            if of_one is not None and into in of_one.split() and into != "...":
                own = max(own, shape[symbols(of_one, len(shape)).index(into)])
        return cls(size, into, own)

    def has(self, axes: str | None) -> bool:
        """Whether an array has the axis that grows."""
        return axes is not None and self.into in axes.split()

    def shape(self, axes: str | None, shape: Sequence[int]) -> tuple[int, ...]:
        """That of a folded array, from that of an example's."""
        if not self.has(axes):
            return tuple(shape)
        if self.into == "...":
            return (self.size, *shape)
        at = self._at(axes, len(shape))
        return (*shape[:at], shape[at] * self.size, *shape[at + 1 :])

    def fold(self, axes: str | None, array: Any, is_mapped: bool) -> Any:
        """The folded array, or None if this one cannot be."""
        if not self.has(axes):
            return None if is_mapped else array
        at = 0 if self.into == "..." else self._at(axes, array.ndim - is_mapped)
        if self.into != "..." and array.shape[at + is_mapped] != self.own:  # of size 1, which stands for all
            return None if is_mapped else array
        if not is_mapped:
            array = jnp.broadcast_to(array, (self.size, *array.shape))
        if self.into == "...":
            return array
        moved = jnp.moveaxis(array, 0, at)
        return moved.reshape(*moved.shape[:at], moved.shape[at] * moved.shape[at + 1], *moved.shape[at + 2 :])

    def unfold(self, axes: str, array: Any) -> Any:
        """The inverse: mapped along the first axis."""
        if self.into == "...":
            return array
        at = self._at(axes, array.ndim)
        # Not -1, which an empty array leaves undetermined.
        split = array.reshape(*array.shape[:at], self.size, array.shape[at] // self.size, *array.shape[at + 1 :])
        return jnp.moveaxis(split, at, 0)

    def fold_all(self, axes: Sequence[str | None], arrays: Sequence[Any], mapped: Sequence[bool]) -> list[Any] | None:
        """All arrays folded; None if one cannot be."""
        found = [self.fold(*one) for one in zip(axes, arrays, mapped, strict=True)]
        return None if any(array is None for array in found) else found

    def struct(self, axes: str | None, struct: Any) -> jax.ShapeDtypeStruct:
        """The folded array's shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape(axes, struct.shape), struct.dtype)

    def names(self, axes: Any, names: Sequence[str | None]) -> tuple[str | None, ...]:
        """The logical names of a folded array's axes: the one that grew has none."""
        if not isinstance(axes, str) or not self.has(axes):
            return tuple(names)
        if self.into == "...":
            return (None, *names)
        at = self._at(axes, len(names))
        return (*names[:at], None, *names[at + 1 :])

    def _at(self, axes: str | None, rank: int) -> int:
        assert axes is not None
        return symbols(axes, rank).index(self.into)
