"""Sharding of an optimizer's state."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["like_parameters"]


def like_parameters(state: Any, params: Any, shardings: Any, replicated: NamedSharding) -> Any:
    """Returns the sharding of every leaf of an optimizer's state.

    A leaf is sharded like a parameter if the leaf's path ends with the parameter's path. A leaf that lacks some of its
    parameter's axes, such as a factored moment, is sharded along the remaining axes. Any other leaf is replicated.

    Args:
      state: optimizer state, or its shapes.
      params: parameters, or their shapes.
      shardings: shardings of the parameters, in the structure of `params`.
      replicated: sharding of leaves without a matching parameter.
    """
    known = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True)
    }

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = _names(path)
        # The longest suffix first, because the path of one parameter may end like the path of another.
        found = next((known[names[start:]] for start in range(len(names)) if names[start:] in known), None)
        return replicated if found is None else _along(leaf.shape, *found) or replicated

    return jax.tree.map_with_path(place, state)


def _along(shape: tuple[int, ...], param_shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding | None:
    """Returns the sharding of an array whose axes are an ordered subset of a parameter's axes, otherwise None."""
    # A spec may be shorter than the rank; missing entries replicate.
    spec = (*sharding.spec, *[None] * (len(param_shape) - len(sharding.spec)))
    split: list[Any] = []
    # Axes are matched by size. Among axes of equal size the first is taken: any of them is a valid sharding.
    for size, mesh_axes in zip(param_shape, spec, strict=True):
        if len(split) < len(shape) and shape[len(split)] == size:
            split.append(mesh_axes)
    return NamedSharding(sharding.mesh, PartitionSpec(*split)) if len(split) == len(shape) else None


def _names(path: Any) -> tuple[str, ...]:
    return tuple(map(str, path))
