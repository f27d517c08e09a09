"""Cached tracing: functions are traced once for each combination of operand types and contexts.

Results are stored in JAX's own cache of traced functions. Its keys include everything else that a trace depends on: the
mesh, user contexts, the matmul precision and the x64 mode.
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
    """Non-array value returned by a traced function, as part of the pytree structure of its result."""

    value: Any


def traced(make: Callable[..., Callable[..., Any]], *key: Any, operands: Sequence[Any], is_shared: bool) -> Any:
    """Traces `make(*key)` on operands, once for each key.

    Args:
      make: module-level function, which is the same object in every call.
      key: arguments of `make`.
      operands: pytrees of arrays, or of objects with a shape and a dtype.
      is_shared: whether later calls may have the same key, which must then be hashable.

    Returns:
      JAX's `Traced`, whose `jaxpr` is the same object for equal keys, types and contexts.
    """
    function = _shared(make, *key) if is_shared else jax.jit(make(*key))
    return function.trace(*operands)


@functools.lru_cache(maxsize=8192)
def _shared(make: Callable[..., Any], *key: Any) -> Any:
    return jax.jit(make(*key))
