"""Symbolic sizes: `jax.export` traces a call with variables in place of sizes, of which Python cannot decide `a < b`.

References take a fixed choice for them. Other implementations are made for sizes and refuse.
"""

from typing import Any, TypeAlias

import jax
from jax.export import is_symbolic_dim

__all__ = ["Size", "has_symbolic_size", "is_symbolic"]

Size: TypeAlias = Any
"""An int, or a variable of `jax.export`."""


def is_symbolic(*sizes: Any) -> bool:
    """Whether any size is a variable of `jax.export`."""
    return any(map(is_symbolic_dim, sizes))


def has_symbolic_size(arrays: Any) -> bool:
    """Whether any leaf of a tree of arrays has a symbolic size."""
    return any(is_symbolic(*leaf.shape) for leaf in jax.tree.leaves(arrays))
