"""Programs of a quantized model that are called eagerly: compiled once for the shapes of their arguments."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import jax

__all__ = ["Compiled"]

_MOST: Final = 64


class Compiled:
    """Compiled functions by what they run; beyond 64 the one that was called longest ago goes. A copy has none."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __reduce__(self) -> Any:
        return Compiled, ()

    def __call__(self, identity: Hashable, function: Callable[..., Any], *arrays: Any) -> Any:
        """`function(*arrays)`; results that are no arrays are those of the first call with such shapes.

        Args:
          identity: equal for functions that do the same.
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
        others = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)}
        return _Outcome([leaf for leaf in leaves if isinstance(leaf, jax.Array)], others, structure)

    return lambda *arrays: run(*arrays).tree()


class _Outcome:
    """A pytree of arrays, flat, that remembers what else there was."""

    def __init__(self, arrays: list[Any], others: dict[int, Any], structure: Any) -> None:
        self.arrays, self.others, self.structure = arrays, others, structure

    def tree(self) -> Any:
        arrays = iter(self.arrays)
        count = len(self.arrays) + len(self.others)
        leaves = [self.others[place] if place in self.others else next(arrays) for place in range(count)]
        return jax.tree.unflatten(self.structure, leaves)


class _Aside:
    """What JAX keeps beside the arrays of a result; each is equal to itself alone, so that it may hold anything."""

    def __init__(self, others: dict[int, Any], structure: Any) -> None:
        self.others, self.structure = others, structure


jax.tree_util.register_pytree_node(
    _Outcome,
    lambda outcome: (outcome.arrays, _Aside(outcome.others, outcome.structure)),
    lambda aside, arrays: _Outcome(list(arrays), aside.others, aside.structure),
)
