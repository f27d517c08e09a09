"""The rows of a head's loss over the devices of a mesh."""

import math
from typing import Any, Final, NamedTuple

from stack_core.abi.mesh import axes_of, constrain, in_mesh, parts_of

__all__ = ["HeadGroups", "RowParts"]

_GROUPED: Final = "rows_of_head"


class RowParts(NamedTuple):
    """Split of the rows over the mesh: along the batch, and along the sequence if labels are [batch, seq].

    Each part accumulates its own gradient of the weight. A sum over all rows would need a collective for every chunk.

    Attributes:
      shape: shape of the labels.
      batch: number of parts along the batch.
      seq: number of parts along the sequence.
    """

    shape: tuple[int, ...]
    batch: int
    seq: int

    @classmethod
    def of(cls, labels: Any) -> "RowParts":
        batch, seq = parts_of("batch"), parts_of("seq")
        if not labels.ndim or labels.shape[0] % batch:
            return cls(labels.shape, 1, 1)
        return cls(labels.shape, batch, seq if labels.ndim == 2 and labels.shape[1] % seq == 0 else 1)

    @property
    def total(self) -> int:
        return self.batch * self.seq

    def split(self, x: Any) -> Any:
        """Reshapes [..., *rest] to [parts, rows of a part, *rest]."""
        rest = x.shape[len(self.shape) :]
        if self.total == 1:
            return x.reshape(1, -1, *rest)
        if self.seq == 1:
            x = x.reshape(self.batch, -1, *rest)
            return constrain(x, "batch", *[None] * (x.ndim - 1), name="linear_cross_entropy's rows")
        x = x.reshape(self.batch, -1, self.seq, self.shape[1] // self.seq, *rest).swapaxes(1, 2)
        x = constrain(x, "batch", "seq", *[None] * (x.ndim - 2), name="linear_cross_entropy's rows")
        return x.reshape(self.total, -1, *rest)

    def join(self, x: Any) -> Any:
        """Reshapes [parts, rows of a part] to the shape of the labels."""
        if self.seq == 1:
            return x.reshape(self.shape)
        parts = x.reshape(self.batch, self.seq, -1, self.shape[1] // self.seq)
        return parts.swapaxes(1, 2).reshape(self.shape)


class HeadGroups(NamedTuple):
    """Groups of parts of the rows. Devices of a group hold different parts of the vocabulary.

    If rules split "act_vocab" over mesh axes that split the batch, such as `fsdp`, each device computes the logits of
    its part of the vocabulary for the rows of all devices along these axes. They exchange the hidden states and their
    gradients, chunk by chunk, and no device holds the full head or its gradient.

    Attributes:
      axes: mesh axes that split the rows, major first.
      sizes: number of devices along each of them.
      shared: the axes among them that split the vocabulary. Without any, each part is a group.
    """

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: RowParts) -> "HeadGroups":
        axes = (*axes_of("batch"), *(axes_of("seq") if parts.seq > 1 else ()))
        shared = tuple(axis for axis in axes if axis in axes_of("act_vocab"))
        if not shared or parts.total == 1:
            return cls()
        return cls(axes, tuple(in_mesh.value[0].shape[axis] for axis in axes), shared)

    def count(self, parts: int) -> int:
        """Returns the number of groups."""
        return parts // math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis in self.shared)

    def gather(self, x: Any) -> Any:
        """Reshapes [parts, rows, ...] to [groups, rows of a group, ...] on each device of the group."""
        if not self.shared:
            return x
        order, axes = self._order(x.ndim)
        grouped = x.reshape(*self.sizes, *x.shape[1:]).transpose(order)
        return self._constrained(grouped.reshape(self.count(x.shape[0]), -1, *x.shape[2:]), axes)

    def scatter(self, x: Any) -> Any:
        """Inverts `gather`: each device keeps the rows of its part."""
        if not self.shared:
            return x
        order, _ = self._order(x.ndim)
        sizes = (*self.sizes, x.shape[0] * x.shape[1] // math.prod(self.sizes), *x.shape[2:])
        parts = x.reshape([sizes[place] for place in order]).transpose([order.index(i) for i in range(len(order))])
        return self._constrained(parts.reshape(math.prod(self.sizes), *sizes[len(self.sizes) :]), self.axes)

    def _order(self, ndim: int) -> tuple[list[int], tuple[str, ...]]:
        """Returns the axes of an array in the order of groups, and the mesh axes of the groups."""
        places = range(len(self.axes))
        first = [place for place in places if self.axes[place] not in self.shared]
        last = [place for place in places if self.axes[place] in self.shared]
        rest = range(len(self.axes), len(self.axes) + ndim - 1)
        return [*first, *last, *rest], tuple(self.axes[place] for place in first)

    def _constrained(self, x: Any, axes: tuple[str, ...]) -> Any:
        mesh, rules = in_mesh.value
        with in_mesh((mesh, rules.updated({_GROUPED: axes}))):
            return constrain(x, _GROUPED, *[None] * (x.ndim - 1), name="linear_cross_entropy's rows")
