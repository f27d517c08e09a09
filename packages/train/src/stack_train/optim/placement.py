"""Sharding of an optimizer's state."""

import itertools
from collections import Counter
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from stack_train.optim.offload import OffloadedState

__all__ = ["like_parameters"]

(_ON_HOST,) = OffloadedState._fields


def like_parameters(state: Any, params: Any, shardings: Any, replicated: NamedSharding) -> Any:
    """Returns the sharding of every leaf of an optimizer's state.

    A leaf is sharded like a parameter if the leaf's path ends with the parameter's path. A leaf that lacks some of its
    parameter's axes, such as a factored moment, or has size 1 there, such as the scales of rows, is sharded along the
    remaining axes. Any other leaf is replicated. Arrays in an `OffloadedState` are in the host's memory.

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

    earlier: Counter[Any] = Counter()  # number of leaves so far, by parameter and shape

    def place(path: Any, leaf: Any) -> NamedSharding:
        sharding = along_parameter(path, leaf)
        on_host = leaf.ndim and any(isinstance(key, GetAttrKey) and key.name == _ON_HOST for key in path)
        return sharding.with_memory_kind("pinned_host") if on_host else sharding

    def along_parameter(path: Any, leaf: Any) -> NamedSharding:
        names = _names(path)
        # The longest suffix first, because the path of one parameter may end like the path of another.
        param = next((names[start:] for start in range(len(names)) if names[start:] in known), None)
        if param is None:
            return replicated
        number, earlier[param, leaf.shape] = earlier[param, leaf.shape], earlier[param, leaf.shape] + 1
        return _along(leaf.shape, *known[param], number) or replicated

    return jax.tree.map_with_path(place, state)


def _along(
    shape: tuple[int, ...], param_shape: tuple[int, ...], sharding: NamedSharding, number: int
) -> NamedSharding | None:
    """Returns the sharding of an array whose axes are an ordered subset of a parameter's axes, otherwise None.

    Axes are matched by size. If several subsets have these sizes, the `number`-th leaf of this shape gets the
    `number`-th subset. For a square matrix, the row moment is along axis 0 and the column moment along axis 1.
    """
    # A spec may be shorter than the rank; missing entries replicate.
    spec = (*sharding.spec, *[None] * (len(param_shape) - len(sharding.spec)))
    if len(shape) == len(param_shape) and all(size in (1, full) for size, full in zip(shape, param_shape, strict=True)):
        kept = [axis if size > 1 else None for size, axis in zip(shape, spec, strict=True)]
        return NamedSharding(sharding.mesh, PartitionSpec(*kept))
    subsets = [
        axes
        for axes in itertools.combinations(range(len(param_shape)), len(shape))
        if tuple(param_shape[axis] for axis in axes) == shape
    ]
    if not subsets:
        return None
    axes = subsets[number % len(subsets)]
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes)))


def _names(path: Any) -> tuple[str, ...]:
    return tuple(map(str, path))
