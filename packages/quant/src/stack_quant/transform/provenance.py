"""Which parameter a value is, and where each of the parameter's axes went."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Part", "Source"]


@dataclass(frozen=True)
class Part:
    """A part of one axis of a parameter: of an index i along it, (i // stride) % size.

    The whole of an axis of n entries has stride 1 and size n; reshaped to (a, b), it is a part of stride b and size a
    and one of stride 1 and size b.

    Attributes:
      cut: the axis was sliced or padded, so that `size` entries stand for the whole of it.
    """

    axis: int
    stride: int
    size: int
    cut: bool = False


Axis = tuple[Part, ...]
"""The parts, the slowest first, that an axis of a value is made of; none where it was added."""


@dataclass(frozen=True)
class Source:
    """What a value is of a parameter.

    Attributes:
      path: the parameter's, with "/" between its segments.
      axes: for each axis of the value its parts of the parameter's axes.
      derived: the primitive that computed it from the parameter, as "mul" in `w * mask`; "" if it is a rearrangement of
        the parameter's entries.
      others: paths of parameters that are stacked with it along a new axis, and are treated alike.
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
        """The parameter itself."""
        return cls(path, tuple((Part(axis, 1, size),) for axis, size in enumerate(shape)))

    def permuted(self, permutation: Sequence[int | None]) -> "Source":
        """Axes in another order; None is an axis that is new."""
        return self._with(tuple(() if axis is None else self.axes[axis] for axis in permutation))

    def resized(self, shape: Sequence[int]) -> "Source":
        """After a slice or padding: what is there of an axis has the role of the whole of it."""
        return self._with(tuple(_resized(axis, size) for axis, size in zip(self.axes, shape, strict=True)))

    def reshaped(self, shape: Sequence[int]) -> "Source":
        """The entries in the same order in another shape; no axis has parts where one would begin within a part."""
        found = self._parts_in(shape)
        return self._with(((),) * len(shape) if found is None else found)

    def _parts_in(self, shape: Sequence[int]) -> tuple[Axis, ...] | None:
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
                    parts.insert(0, Part(part.axis, part.stride, rest, part.cut))
                    part = Part(part.axis, part.stride * rest, wanted, part.cut)
                    wanted = 1
                else:
                    return None
                taken.append(part)
            axes.append(tuple(taken))
        return None if parts else tuple(axes)

    def as_derived(self, primitive: str) -> "Source":
        """The source of what a primitive computes from it, entry by entry."""
        return dataclasses.replace(self, derived=self.derived or primitive)

    def stacked(self, sources: "Sequence[Source]") -> "Source":
        """The source of several parameters that are stacked along a new axis."""
        return dataclasses.replace(self, others=tuple(path for source in sources for path in source.paths)[1:])

    def without(self, axis: int) -> "Source":
        """One entry along an axis."""
        return self._with((*self.axes[:axis], *self.axes[axis + 1 :]))

    def parts(self, axes: Sequence[int]) -> tuple[Part, ...]:
        """The parts that some axes of the value are made of, in their order."""
        return tuple(part for axis in axes for part in self.axes[axis])

    def _with(self, axes: tuple[Axis, ...]) -> "Source":
        return dataclasses.replace(self, axes=axes)


def _resized(axis: Axis, size: int) -> Axis:
    if not axis or math.prod(part.size for part in axis) == size:
        return axis
    return (Part(axis[0].axis, 1, size, cut=True),)
