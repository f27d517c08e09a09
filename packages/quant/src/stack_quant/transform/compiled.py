"""A cache of compiled programs for eager calls of a quantized model."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import jax

__all__ = ["Compiled"]

_MOST: Final = 64  # compiled functions in one cache


class Compiled:
    """A cache of up to 64 compiled functions, which evicts the least recently used. A copy starts empty."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    # Compiled functions cannot be pickled.
    def __reduce__(self) -> Any:
        return Compiled, ()

    def __call__(self, identity: Hashable, function: Callable[..., Any], *arrays: Any) -> Any:
        """Computes `function(*arrays)`. Results that are not arrays come from the trace for the shapes of the arrays.

        Args:
          identity: cache key, equal for functions that compute the same.
          arrays: pytrees of arrays.
        """
        if identity not in self._kept:
            self._kept[identity] = _jitted(function)
        self._kept.move_to_end(identity)
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return self._kept[identity](*arrays)


def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    @jax.jit
    def run(*arrays: Any) -> Any:
        leaves, structure = jax.tree.flatten(function(*arrays))
        static_leaves = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)}
        return _Result([leaf for leaf in leaves if isinstance(leaf, jax.Array)], static_leaves, structure)

    return lambda *arrays: run(*arrays).tree()


class _Result:
    """A result as a list of its arrays, with its other leaves and its structure as static data."""

    def __init__(self, arrays: list[Any], static_leaves: dict[int, Any], structure: Any) -> None:
        self.arrays, self.static_leaves, self.structure = arrays, static_leaves, structure

    def tree(self) -> Any:
        arrays = iter(self.arrays)
        count = len(self.arrays) + len(self.static_leaves)
        leaves = [self.static_leaves[place] if place in self.static_leaves else next(arrays) for place in range(count)]
        return jax.tree.unflatten(self.structure, leaves)


class _StaticData:
    """Static data of a result. Comparison by identity allows values of any type."""

    def __init__(self, static_leaves: dict[int, Any], structure: Any) -> None:
        self.static_leaves, self.structure = static_leaves, structure


jax.tree_util.register_pytree_node(
    _Result,
    lambda result: (result.arrays, _StaticData(result.static_leaves, result.structure)),
    lambda static, arrays: _Result(list(arrays), static.static_leaves, static.structure),
)
