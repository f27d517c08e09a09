"""Functions that are traced once for operands of the same types in the same context, and never again.

JAX's own cache of traced functions holds the result. It knows what a trace depends on besides the function and the
types of its operands: the mesh, the user's contexts, the precision and the widths of numbers.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Static", "traced"]


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A value that a traced function returns beside its arrays: no array, and a part of the result's structure."""

    value: Any


def traced(make: Callable[..., Callable[..., Any]], *key: Any, operands: Sequence[Any], is_shared: bool) -> Any:
    """Traces `make(*key)` on operands, once for each key.

    Args:
      make: a function of a module, so that it is the same at each call.
      operands: pytrees of arrays, or of what has a shape and a dtype.
      is_shared: whether later calls may come with the same key, which is hashed.

    Returns:
      JAX's `Traced`, whose `jaxpr` is the same object for equal keys, types and contexts.
    """
    function = _shared(make, *key) if is_shared else jax.jit(make(*key))
    return function.trace(*operands)


@functools.lru_cache(maxsize=8192)
def _shared(make: Callable[..., Any], *key: Any) -> Any:
    return jax.jit(make(*key))
