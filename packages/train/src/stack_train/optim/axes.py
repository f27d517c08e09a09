"""Classification of parameters by their logical axes."""

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["AxesTree", "is_hidden_matrix", "is_matrix", "map_axes", "matrix_axes"]

AxesTree = Any
"""Nested dicts with the tuple of logical axis names of each parameter; None is an axis without a name."""

# Axes along which one array holds the parameters of several layers or experts. They come first.
_STACKED = ("layers", "experts")


def map_axes(function: Callable[[tuple[str | None, ...]], Any], axes: AxesTree) -> Any:
    """Applies a function to the logical axes of every parameter."""
    return jax.tree.map(function, axes, is_leaf=lambda node: isinstance(node, tuple))


def matrix_axes(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Returns the positions of the axes that are not stacked, without the leading "layers" and "experts"."""
    stacked = 0
    while stacked < len(axes) and axes[stacked] in _STACKED:
        stacked += 1
    return tuple(range(stacked, len(axes)))


def is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter has two or more unstacked axes, unlike a scale or a bias."""
    return len(matrix_axes(axes)) >= 2


def is_hidden_matrix(axes: tuple[str | None, ...]) -> bool:
    """Returns whether a parameter is a matrix between hidden activations; embeddings and heads are not."""
    return len(matrix_axes(axes)) == 2 and "vocab" not in axes
