"""Rearrangements of quantized arrays, which act on the codes and accordingly on the scales."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import QView
from stack_quant.transformed import TransformedArray

__all__ = [
    "View",
    "axis_groups",
    "broadcast",
    "dynamic_slice",
    "full_along",
    "gathered",
    "is_constant_along",
    "joined",
    "on_codes",
    "pad",
    "reshape",
    "reverse",
    "slice_",
    "sliceable",
    "transpose",
    "view_of",
    "with_axis",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """A quantized array with the fields of its `QView`, whose invariants it shares. All leaves have the array's axes.

    Attributes:
      codes: unpacked codes.
      scale: scales, with their unit.
      zero_point: codes of 0, or None.
      scheme: description for messages.
      dtype: name of the dtype of the dequantized array.
      codebook: values that the codes index, or None.
    """

    codes: Any  # Any, as JAX also builds this pytree from shapes, axes and shardings
    scale: Any
    zero_point: Any
    scheme: str = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    codebook: tuple[float, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __stack_qview__(self) -> QView:
        codebook = None if self.codebook is None else jnp.asarray(self.codebook, jnp.float32)
        return QView((1, 0), self.codes, self.scale, self.zero_point, self.scheme, codebook)


def view_of(array: Any) -> View:
    """Returns the view of a quantized array; a `View` is returned unchanged."""
    if isinstance(array, View):
        return array
    if isinstance(array, TransformedArray):
        # Rotated arrays show their dequantized values instead of indices of a codebook.
        codebook = None if array.block > 1 else view_of(array.base).codebook
    else:
        codebook = array.qtype.codebook
    shown = array.__stack_qview__()
    return View(shown.qvalue, shown.scale, shown.zero_point, shown.scheme, array.dtype, codebook)


def _mapped(view: View, codes: jax.Array, rearrange: Callable[[jax.Array], jax.Array]) -> View:
    zero_point = None if view.zero_point is None else rearrange(view.zero_point)
    return dataclasses.replace(view, codes=codes, scale=rearrange(view.scale), zero_point=zero_point)


def on_codes(view: View, function: Callable[[jax.Array], jax.Array]) -> View:
    """Applies a function that does not move entries to the codes."""
    return dataclasses.replace(view, codes=function(view.codes))


def transpose(array: Any, permutation: Sequence[int]) -> Any:
    """Transposes a quantized array, as `lax.transpose`. Transforms of inputs stay."""
    if isinstance(array, TransformedArray):
        return array.transposed(transpose(array.base, permutation), permutation)
    view = view_of(array)
    return _mapped(view, view.codes.transpose(permutation), lambda scale: scale.transpose(permutation))


def full_along(view: View, axes: Sequence[int]) -> View:
    """Repeats the scales to one per entry along `axes`."""

    def repeated(scale: jax.Array) -> jax.Array:
        for axis in axes:
            if scale.shape[axis] != view.shape[axis]:
                scale = jnp.repeat(scale, view.shape[axis] // scale.shape[axis], axis=axis)
        return scale

    return _mapped(view, view.codes, repeated)


def gathered(view: View, axis: int, gather: Callable[[jax.Array], jax.Array]) -> View:
    """Gathers a view from its shards along an axis, inside of a `jax.shard_map`. A scale for all entries stays one."""
    is_shared = is_constant_along(view, axis) and view.shape[axis] > 1
    return _mapped(view, gather(view.codes), (lambda scale: scale) if is_shared else gather)


def sliceable(array: Any) -> Any:
    """Returns a quantized array whose leaves have all entries along the first axis, and can be sliced there."""
    if isinstance(array, TransformedArray):
        if array.block > 1 and array.axis == -array.ndim:  # slices would cut the rotated blocks
            return full_along(view_of(array), [0])
        scale = array.scale
        if scale is not None:
            scale = jnp.broadcast_to(scale, (array.shape[0], *scale.shape[1:]))
        return dataclasses.replace(array, base=sliceable(array.base), scale=scale)
    return array if array.scale.shape[0] == array.shape[0] else full_along(view_of(array), [0])


def with_axis(array: Any, axis: int) -> Any:
    """Returns a quantized array with a new axis of one entry."""
    shape = (*array.shape[:axis], 1, *array.shape[axis:])
    if not isinstance(array, TransformedArray):
        return reshape(view_of(array), shape)
    place = array.axis % array.ndim
    moved = place + (axis <= place) - len(shape)
    scale = None if array.scale is None else jnp.expand_dims(array.scale, axis)
    return TransformedArray(reshape(view_of(array.base), shape), scale, moved, array.block)


def is_constant_along(view: View, axis: int) -> bool:
    """Returns whether all entries along an axis share a scale."""
    return view.scale.shape[axis] == 1


def reshape(view: View, shape: Sequence[int]) -> View:
    """Reshapes the array as `lax.reshape` does, and repeats scales if the new axes require repetition."""
    # The axes of an empty array cannot be matched by their numbers of entries.
    if math.prod(shape) == 0:
        return _mapped(view, view.codes.reshape(shape), lambda scale: jnp.ones(shape, scale.dtype))
    groups = axis_groups(view.shape, shape)
    view = full_along(view, [axis for old, new in groups for axis in _to_repeat(view, old, [shape[i] for i in new])])
    counts = [count for old, new in groups for count in _counts(view, old, [shape[i] for i in new])]
    return _mapped(view, view.codes.reshape(shape), lambda scale: scale.reshape(counts))


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Groups the axes of two shapes into the finest pairs of runs of axes with the same number of entries."""
    groups: list[tuple[list[int], list[int]]] = []
    i, j = 0, 0
    while i < len(old) or j < len(new):
        olds: list[int] = []
        news: list[int] = []
        left, right = 1, 1
        while left != right or not (olds or news):
            if i < len(old) and (left <= right or j == len(new)):
                left *= old[i]
                olds.append(i)
                i += 1
            else:
                right *= new[j]
                news.append(j)
                j += 1
        groups.append((olds, news))
    return groups


def _to_repeat(view: View, axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the axes of a group that need a scale per entry before the group can be reshaped to `sizes`.

    Flattened, the group consists of equal stretches of entries with the same scale once the axes before the last scaled
    one have a scale per entry. If these stretches fit the new axes, nothing else needs to be repeated.
    """
    significant = [axis for axis in axes if view.shape[axis] > 1]
    scaled = [axis for axis in significant if view.scale.shape[axis] > 1]
    if not scaled:
        return []
    last = significant.index(scaled[-1])
    repeat = [axis for axis in significant[:last] if view.scale.shape[axis] != view.shape[axis]]
    stretches = math.prod(view.shape[axis] for axis in significant[:last]) * view.scale.shape[scaled[-1]]
    return repeat if _split(stretches, sizes) is not None else significant


def _split(stretches: int, sizes: Sequence[int]) -> list[int] | None:
    """Distributes equal stretches over axes of `sizes`; returns the number along each axis, or None if that fails."""
    counts = []
    for size in sizes:
        if stretches % size == 0:
            counts.append(size)
            stretches //= size
        elif size % stretches == 0:
            counts.append(stretches)
            stretches = 1
        else:
            return None
    return counts if stretches == 1 else None


def _counts(view: View, axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    counts = _split(math.prod(view.scale.shape[axis] for axis in axes), sizes)
    assert counts is not None, "scales were repeated until they fit"
    return counts


def reverse(view: View, axes: Sequence[int]) -> View:
    """Reverses the array along axes, as `lax.rev`."""
    return _mapped(view, lax.rev(view.codes, axes), lambda scale: lax.rev(scale, axes))


def pad(view: View, widths: Sequence[tuple[int, int]]) -> View:
    """Pads the array with zeros before and after each axis."""
    cut = [axis for axis, width in enumerate(widths) if width != (0, 0) and view.scale.shape[axis] > 1]
    view = full_along(view, cut)
    kept = [width if axis in cut else (0, 0) for axis, width in enumerate(widths)]
    # The code of 0 in a codebook is an index.
    zero = 0 if view.codebook is None else view.codebook.index(0.0)
    inside = jnp.pad(jnp.ones(view.shape, bool), widths)
    codes = lax.pad(view.codes, jnp.asarray(zero, view.codes.dtype), [(*width, 0) for width in widths])
    # A code of 0 is 0 under any scale, so the scales at the edge serve the padding.
    padded = _mapped(view, codes, lambda scale: jnp.pad(scale, kept, mode="edge"))
    if view.zero_point is None:
        return padded
    zeros = jnp.broadcast_to(full_along(padded, range(len(widths))).zero_point, codes.shape)
    return dataclasses.replace(padded, codes=jnp.where(inside, codes, zeros.astype(codes.dtype)))


def joined(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays with one entry along an axis; returns None if their quantization differs."""
    parts = [part if isinstance(part, TransformedArray) else view_of(part) for part in parts]
    # The structures contain the static fields: scheme, dtype and codebook.
    forms = [(jax.tree.structure(part), [leaf.shape for leaf in jax.tree.leaves(part)]) for part in parts]
    if any(form != forms[0] for form in forms):
        return None
    return jax.tree.map(lambda *leaves: lax.concatenate(leaves, axis), *parts)


def slice_(view: View, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> View:
    """Slices the array, as `lax.slice`."""
    cut = [
        axis
        for axis, size in enumerate(view.shape)
        if (start[axis], limit[axis], strides[axis]) != (0, size, 1) and view.scale.shape[axis] > 1
    ]
    view = full_along(view, cut)

    def sliced(scale: jax.Array) -> jax.Array:
        ends = [limit[axis] if axis in cut else size for axis, size in enumerate(scale.shape)]
        starts = [start[axis] if axis in cut else 0 for axis in range(scale.ndim)]
        steps = [strides[axis] if axis in cut else 1 for axis in range(scale.ndim)]
        return lax.slice(scale, starts, ends, steps)

    return _mapped(view, lax.slice(view.codes, start, limit, strides), sliced)


def dynamic_slice(view: View, starts: Sequence[Any], sizes: Sequence[int]) -> View:
    """Slices the array, as `lax.dynamic_slice`."""
    cut = [axis for axis, size in enumerate(view.shape) if sizes[axis] != size and view.scale.shape[axis] > 1]
    view = full_along(view, cut)

    def sliced(scale: jax.Array) -> jax.Array:
        # All starts of a dynamic slice must have one dtype.
        begins = [start if axis in cut else jnp.zeros_like(start) for axis, start in enumerate(starts)]
        return lax.dynamic_slice(
            scale, begins, [sizes[axis] if axis in cut else size for axis, size in enumerate(scale.shape)]
        )

    return _mapped(view, lax.dynamic_slice(view.codes, starts, sizes), sliced)


def broadcast(view: View, shape: Sequence[int], axes: Sequence[int]) -> View:
    """Broadcasts the array, as `lax.broadcast_in_dim`. Scales are not repeated along new axes."""

    def widened(scale: jax.Array) -> jax.Array:
        counts = [1] * len(shape)
        for place, axis in enumerate(axes):
            counts[axis] = scale.shape[place]
        return lax.broadcast_in_dim(scale, counts, axes)

    return _mapped(view, lax.broadcast_in_dim(view.codes, shape, axes), widened)
