"""Symbolic sizes: variables that `jax.export` traces in place of sizes, for which `a < b` may be undecidable.

References make a fixed choice for symbolic sizes. Other implementations are specialized to sizes and reject them.
"""

from typing import Any, TypeAlias

import jax
from jax.export import is_symbolic_dim

__all__ = ["Size", "has_symbolic_size", "is_symbolic"]

Size: TypeAlias = Any
"""An int or a variable of `jax.export`."""


def is_symbolic(*sizes: Any) -> bool:
    """Returns whether any size is a variable of `jax.export`."""
    return any(map(is_symbolic_dim, sizes))


def has_symbolic_size(arrays: Any) -> bool:
    """Returns whether any leaf of a tree of arrays has a symbolic size."""
    return any(is_symbolic(*leaf.shape) for leaf in jax.tree.leaves(arrays))
