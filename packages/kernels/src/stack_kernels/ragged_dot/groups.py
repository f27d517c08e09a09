"""Rows by group, as kernels for accelerators take them: sizes that fit, whole tiles, nothing after the groups."""

from typing import Any

import jax.numpy as jnp

__all__ = ["cut", "padded", "zero_after"]


def cut(group_sizes: Any, rows: int) -> Any:
    """The sizes in int32, without what exceeds the rows."""
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def padded(rows: Any, tile: int) -> Any:
    """With zeros to a whole number of tiles."""
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)))


def zero_after(sizes: Any, rows: Any) -> Any:
    """Zeroes the rows after the last group."""
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), rows, 0).astype(rows.dtype)
