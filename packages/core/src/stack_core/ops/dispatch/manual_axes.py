"""The types of arrays inside `jax.shard_map`, where JAX tracks the mesh axes that each array varies over."""

from typing import Any

import jax
from jax import lax

__all__ = ["vary_alike", "varying"]


def vary_alike(*trees: Any) -> Any:
    """The arrays, typed as varying over every manual mesh axis that one of them varies over.

    A loop's carry must vary as what is added to it, and a gradient as its operand. The gradient of an array that did
    not vary, such as a weight that all devices share, is then summed over the devices. Outside `jax.shard_map` nothing
    varies, and the arrays are returned as they are.
    """
    axes = {axis for leaf in jax.tree.leaves(trees) for axis in varying(leaf)}

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, trees)


def varying(array: Any) -> frozenset[str]:
    """The manual mesh axes that an array varies over."""
    return jax.typeof(array).mat.varying
