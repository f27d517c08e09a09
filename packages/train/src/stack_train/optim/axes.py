"""What the logical axes of a parameter tell an optimizer."""

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["AxesTree", "is_hidden_matrix", "is_matrix", "map_axes", "matrix_axes"]

AxesTree = Any
"""Nested dicts with, for each parameter, the tuple of its logical axis names; None is an axis without a name."""

_STACKED = ("layers", "experts")


def map_axes(function: Callable[[tuple[str | None, ...]], Any], axes: AxesTree) -> Any:
    """Applies a function to the logical axes of every parameter."""
    return jax.tree.map(function, axes, is_leaf=lambda node: isinstance(node, tuple))


def matrix_axes(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """The positions of the axes that are not stacked: stacked ones lead, one array for all layers or experts."""
    stacked = 0
    while stacked < len(axes) and axes[stacked] in _STACKED:
        stacked += 1
    return tuple(range(stacked, len(axes)))


def is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix, or a tensor, rather than a scale or a bias."""
    return len(matrix_axes(axes)) >= 2


def is_hidden_matrix(axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix between hidden activations, which embeddings and heads are not."""
    return len(matrix_axes(axes)) == 2 and "vocab" not in axes
