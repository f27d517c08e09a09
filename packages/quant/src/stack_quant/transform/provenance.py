"""Provenance of values: the source parameter of a value, and the position of the parameter's axes in the value."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Part", "Source"]


@dataclass(frozen=True)
class Part:
    """A part of one axis of a parameter. The index i along the axis has the index (i // stride) % size along the part.

    A complete axis of n entries has stride 1 and size n. Reshaped to (a, b), it consists of a part with stride b and
    size a, and a part with stride 1 and size b.

    Attributes:
      axis: axis of the parameter.
      stride: distance along the axis of neighbouring entries of the part.
      size: number of entries of the part.
      cut: True if the axis was sliced or padded; `size` entries then represent the complete axis.
    """

    axis: int
    stride: int
    size: int
    cut: bool = False


Axis = tuple[Part, ...]
"""The parts that make up an axis of a value, the slowest first; empty for an added axis."""


@dataclass(frozen=True)
class Source:
    """The source parameter of a value.

    Attributes:
      path: path of the parameter, with "/" between its segments.
      axes: composition of each axis of the value from parts of the parameter's axes.
      derived: primitive that computed the value from the parameter, such as "mul" in `w * mask`; "" if the value is a
        rearrangement of the parameter's entries.
      others: paths of the parameters that are stacked with it along a new axis and are treated identically.
    """

    path: str
    axes: tuple[Axis, ...]
    derived: str = ""
    others: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.others)

    @classmethod
    def of(cls, path: str, shape: Sequence[int]) -> "Source":
        """Returns the source of the parameter itself."""
        return cls(path, tuple((Part(axis, 1, size),) for axis, size in enumerate(shape)))

    def permuted(self, permutation: Sequence[int | None]) -> "Source":
        """Returns the source after a permutation of the axes; None adds a new axis."""
        return self._with(tuple(() if axis is None else self.axes[axis] for axis in permutation))

    def resized(self, shape: Sequence[int]) -> "Source":
        """Returns the source after slicing or padding. The entries then represent the complete axis."""
        return self._with(tuple(_resized(axis, size) for axis, size in zip(self.axes, shape, strict=True)))

    def reshaped(self, shape: Sequence[int]) -> "Source":
        """Returns the source after a reshape. If a new axis would begin within a part, the axes lose their parts."""
        found = self._parts_in(shape)
        return self._with(((),) * len(shape) if found is None else found)

    def _parts_in(self, shape: Sequence[int]) -> tuple[Axis, ...] | None:
        # Parts of one entry fit anywhere and would only break the match.
        parts = [part for axis in self.axes for part in axis if part.size > 1]
        axes = []
        for size in shape:
            taken: list[Part] = []
            wanted = size
            while wanted > 1:
                if not parts:
                    return None
                part = parts.pop(0)
                if wanted % part.size == 0:
                    wanted //= part.size
                elif part.size % wanted == 0:
                    rest = part.size // wanted
                    # The new axis gets the slower factor of the part; the faster one remains for the next axis.
                    parts.insert(0, Part(part.axis, part.stride, rest, part.cut))
                    part = Part(part.axis, part.stride * rest, wanted, part.cut)
                    wanted = 1
                else:
                    return None
                taken.append(part)
            axes.append(tuple(taken))
        return None if parts else tuple(axes)

    def as_derived(self, primitive: str) -> "Source":
        """Returns the source of the result of an elementwise primitive."""
        return dataclasses.replace(self, derived=self.derived or primitive)

    def stacked(self, sources: "Sequence[Source]") -> "Source":
        """Returns the source of several parameters stacked along a new axis."""
        # Without the first path, which is `path`.
        return dataclasses.replace(self, others=tuple(path for source in sources for path in source.paths)[1:])

    def without(self, axis: int) -> "Source":
        """Returns the source of one entry along an axis."""
        return self._with((*self.axes[:axis], *self.axes[axis + 1 :]))

    def parts(self, axes: Sequence[int]) -> tuple[Part, ...]:
        """Returns the parts of some axes of the value, in order."""
        return tuple(part for axis in axes for part in self.axes[axis])

    def _with(self, axes: tuple[Axis, ...]) -> "Source":
        return dataclasses.replace(self, axes=axes)


def _resized(axis: Axis, size: int) -> Axis:
    if not axis or math.prod(part.size for part in axis) == size:
        return axis
    return (Part(axis[0].axis, 1, size, cut=True),)
