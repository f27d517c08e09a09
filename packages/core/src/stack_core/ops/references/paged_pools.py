"""The layouts of pools of pages: the order of their axes, and whether one pool holds both keys and values."""

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

__all__ = ["LAYOUTS", "beside", "holds_values", "in_layout", "parts"]

LAYOUTS: Final[Mapping[str, str]] = {
    "phsd": "pages kv_heads slots head_dim",
    "pshd": "pages slots kv_heads head_dim",
    "hpsd": "kv_heads pages slots head_dim",
    "psh2d": "pages slots kv_heads 2 head_dim",
}
"""The axes of a pool of pages by the name of its layout, which is their initials; of values too, of another width.

With the axis 2 one pool holds keys, at 0, and values, at 1.
"""


def holds_values(layout: str) -> bool:
    """Whether one pool in this layout holds both keys and values."""
    return "2" in layout


def beside(key: jax.Array, value: jax.Array) -> jax.Array:
    """Keys and values [..., head_dim] as a pool that holds both has them, [..., 2, head_dim]."""
    return jnp.stack([key, value], axis=-2)


def parts(pool: jax.Array, layout: str) -> list[jax.Array]:
    """The keys of a pool that holds both, and the values; any other pool is its only part.

    Args:
      layout: the initials of the pool's axes, of which the parts lack the 2.
    """
    if not holds_values(layout):
        return [pool]
    return [jnp.take(pool, half, axis=layout.index("2")) for half in (0, 1)]


def in_layout(pools: tuple[Any, Any], given: str, wanted: str) -> tuple[Any, Any] | None:
    """The shapes of the pools of keys and of values in another layout, None for a pool that there is not.

    Args:
      pools: arrays or their shapes; of quantized ones each part is laid out alike.

    Returns:
      None where the pools do not fit into one that holds both: the values are parts of the keys, or of another width or
      dtype.
    """
    key, value = pools
    if not holds_values(wanted):
        value = key if holds_values(given) else value
        return _laid_out(key, given, wanted), None if value is None else _laid_out(value, given, wanted)
    if not holds_values(given):
        types = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pool)] for pool in pools]
        if types[0] != types[1]:
            return None
    return _laid_out(key, given, wanted), None


def _laid_out(pool: Any, given: str, wanted: str) -> Any:
    def leaf(array: Any) -> jax.ShapeDtypeStruct:
        sizes = {"2": 2, **dict(zip(given, array.shape, strict=True))}
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in wanted), array.dtype)

    return jax.tree.map(leaf, pool)
