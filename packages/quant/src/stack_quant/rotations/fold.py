"""Rotations of a program's parameters that do not change its results."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_quant.errors import RuleError
from stack_quant.rotations import entries, products
from stack_quant.rotations.bases import Basis, fix, parts_of
from stack_quant.rotations.symmetries import NormScale, Symmetries, find_symmetries
from stack_quant.transform.program import Program
from stack_quant.transformed import hadamard

__all__ = ["fold_rotations", "rotate"]

HANDLED = (entries, products)
"""Modules that register the handlers of the analysis on import."""


def fold_rotations(
    program: Program,
    arrays: Mapping[str, Any],
    *,
    stream: bool,
    heads: bool,
    may_rotate: Callable[[str], bool] = lambda path: True,
) -> dict[str, Any]:
    """Returns rotated values of the parameters that a rotation changes, by path. Shapes are only checked.

    Args:
      program: traced call that uses all parameters.
      arrays: parameters in float, by path.
      stream: rotates the basis in which the largest table is looked up, such as a residual stream.
      heads: rotates the remaining bases, such as the values of attention heads.
      may_rotate: predicate on paths that is False for arrays that are not parameters.

    Raises:
      RuleError: an operation of the program fixes these bases, or the call does not use all parameters.
    """
    found = find_symmetries(program.jaxpr, {path: arrays[path].shape for path in program.paths})
    movable = [path for path in program.paths if may_rotate(path) and jnp.issubdtype(arrays[path].dtype, jnp.floating)]
    unused = [path for path in movable if path not in found.uses and path not in found.scales]
    if unused:
        raise RuleError(
            f"The sampled call does not use {', '.join(unused[:8])}, so other calls may read what a rotation changes. "
            "Use an algorithm that does not rotate the model, such as hadamard."
        )
    for path in set(program.paths) - {*movable}:
        for axis in found.parameters[path]:
            fix(axis, f"{path} is no parameter")
    _select(found, arrays, stream=stream, heads=heads)
    scales = [scale for scale in found.scales.values() if any(map(_is_rotated, scale.axes))]
    changed = {}
    for path in movable:
        own = [scale for scale in scales if path in scale.matrices]
        axes = found.parameters[path]
        if any(scale.path == path for scale in scales):
            (scale,) = (scale for scale in scales if scale.path == path)
            changed[path] = None if _is_shape(arrays[path]) else jnp.full_like(arrays[path], 1 - scale.offset)
        elif own or any(map(_is_rotated, axes)):
            changed[path] = None if _is_shape(arrays[path]) else _folded(arrays, path, own, axes)
    return {path: array for path, array in changed.items() if array is not None}


def _is_shape(array: Any) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct)


def _is_rotated(axis: Any) -> bool:
    return any(not basis.fixed for basis in parts_of(axis))


def _select(found: Symmetries, arrays: Mapping[str, Any], *, stream: bool, heads: bool) -> None:
    """Fixes the bases that are not requested, and checks that there is a basis to rotate."""
    table = max(found.tables, key=lambda path: arrays[path].size, default=None)
    of_stream = [basis for axis in found.tables.get(table or "", ()) for basis in parts_of(axis)]
    if stream and table is not None and all(basis.fixed for basis in of_stream):
        reason = next((basis.fixed for basis in of_stream), "the lookup takes parts of its entries")
        raise RuleError(
            f"algorithm='quarot' cannot rotate the residual stream, which {table} writes: {reason}. Use "
            "'quarot,stream=0', which rotates only the values of attention, or 'hadamard', which rotates inputs online."
        )
    for axis in (axis for axes in found.parameters.values() for axis in axes):
        for basis in parts_of(axis):
            if not (stream if basis in of_stream else heads):
                fix((basis,), "it is not requested")
    if not any(_is_rotated(axis) for axes in found.parameters.values() for axis in axes):
        raise RuleError(
            "algorithm='quarot' finds no axes of parameters whose rotation leaves the results unchanged. Use another "
            "algorithm, such as 'hadamard', which rotates inputs online."
        )


def _folded(arrays: Mapping[str, Any], path: str, scales: list[NormScale], axes: Any) -> jax.Array:
    """Multiplies a parameter by the scales of the norms before it, and rotates its axes."""
    array = jnp.asarray(arrays[path])
    dtype, array = array.dtype, array.astype(jnp.float32)
    for scale in scales:
        vector = jnp.asarray(arrays[scale.path]).astype(jnp.float32) + scale.offset
        sizes = [1] * array.ndim
        sizes[: vector.ndim - 1], sizes[scale.matrices[path]] = vector.shape[:-1], vector.shape[-1]
        array = array * vector.reshape(sizes)
    shape = array.shape
    for place, axis in enumerate(axes):
        parts: list[Basis] = parts_of(axis)
        if not _is_rotated(axis):
            continue
        array = array.reshape(*shape[:place], *(basis.size for basis in parts), *shape[place + 1 :])
        for number, basis in enumerate(parts):
            array = array if basis.fixed else rotate(array, place + number)
        array = array.reshape(shape)
    return array.astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def rotate(array: jax.Array, axis: int) -> jax.Array:
    """Multiplies every vector v along an axis by an orthogonal matrix R for their size.

        R = diag(s) (C x H)

    s: random signs; H: the orthonormal Hadamard matrix of the largest power of two that divides the size; C: the
    orthonormal DCT-II matrix of the other factor of the size; x: the Kronecker product.
    """
    size = array.shape[axis]
    block = size & -size
    # Two runs of the same model must be rotated alike, so the signs depend only on the size.
    signs = np.random.default_rng(size).choice((-1.0, 1.0), size)
    moved = hadamard(jnp.moveaxis(array, axis, -1) * jnp.asarray(signs, array.dtype), -1, block)
    if size > block:
        split = moved.reshape(*moved.shape[:-1], size // block, block)
        cosines = jnp.asarray(_cosines(size // block), array.dtype)
        moved = jnp.einsum("...ib,ij->...jb", split, cosines, precision="highest").reshape(moved.shape)
    return jnp.moveaxis(moved, -1, axis)


def _cosines(size: int) -> np.ndarray:
    """Returns the orthonormal DCT-II matrix, whose entries are at most sqrt(2 / size)."""
    frequency, place = np.arange(size)[:, None], np.arange(size)[None, :]
    matrix = np.cos(np.pi * (2 * place + 1) * frequency / (2 * size)) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix
