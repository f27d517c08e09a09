"""Layouts of page pools: order of the axes, and whether a single pool stores keys and values."""

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

__all__ = ["LAYOUTS", "holds_values", "in_layout", "parts", "stack_key_value"]

LAYOUTS: Final[Mapping[str, str]] = {
    "phsd": "pages kv_heads slots head_dim",
    "pshd": "pages slots kv_heads head_dim",
    "hpsd": "kv_heads pages slots head_dim",
    "psh2d": "pages slots kv_heads 2 head_dim",
}
"""Axes of a page pool by layout name, which consists of their initials. Pools of values may have another head_dim.

Along the axis 2, a combined pool has keys at index 0 and values at index 1.
"""


def holds_values(layout: str) -> bool:
    """Returns whether a pool in this layout stores both keys and values."""
    return "2" in layout


def stack_key_value(key: jax.Array, value: jax.Array) -> jax.Array:
    """Stacks keys and values [..., head_dim] as in a combined pool, [..., 2, head_dim]."""
    return jnp.stack([key, value], axis=-2)


def parts(pool: jax.Array, layout: str) -> list[jax.Array]:
    """Splits a combined pool into keys and values; any other pool is returned as the only part.

    Args:
      layout: initials of the pool's axes. The parts do not have the axis 2.
    """
    if not holds_values(layout):
        return [pool]
    return [jnp.take(pool, half, axis=layout.index("2")) for half in (0, 1)]


def in_layout(pools: tuple[Any, Any], layout: str, target_layout: str) -> tuple[Any, Any] | None:
    """Returns the shapes of the pools of keys and values in another layout, with None for an absent pool.

    Args:
      pools: arrays or `jax.ShapeDtypeStruct`s of keys and values; every leaf of a quantized pool is converted.

    Returns:
      The two pools, or None if they cannot be combined into one pool because the values are part of the keys or have
      another width or dtype.
    """
    key, value = pools
    if not holds_values(target_layout):
        value = key if holds_values(layout) else value
        return _laid_out(key, layout, target_layout), None if value is None else _laid_out(value, layout, target_layout)
    if not holds_values(layout):
        types = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pool)] for pool in pools]
        if types[0] != types[1]:
            return None
    return _laid_out(key, layout, target_layout), None


def _laid_out(pool: Any, layout: str, target_layout: str) -> Any:
    def leaf(array: Any) -> jax.ShapeDtypeStruct:
        sizes = {"2": 2, **dict(zip(layout, array.shape, strict=True))}
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in target_layout), array.dtype)

    return jax.tree.map(leaf, pool)
