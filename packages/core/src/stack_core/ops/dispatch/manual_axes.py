"""Varying manual axes of arrays inside `jax.shard_map`, which JAX tracks in their types."""

from typing import Any

import jax
from jax import lax

__all__ = ["vary_alike", "varying"]


def vary_alike(*trees: Any) -> Any:
    """Casts all arrays to vary over every manual mesh axis that any of them varies over.

    A loop's carry must vary like the values added to it, and a gradient like its operand. The gradient of an array that
    did not vary, such as a replicated weight, is then summed over devices. Outside `jax.shard_map`, arrays are returned
    unchanged.
    """
    axes = {axis for leaf in jax.tree.leaves(trees) for axis in varying(leaf)}

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, trees)


def varying(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes that an array varies over."""
    return jax.typeof(array).mat.varying
