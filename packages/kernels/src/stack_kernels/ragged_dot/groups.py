"""Rows by group in the form of accelerator kernels: sizes within bounds, full tiles, zeros after the groups."""

from typing import Any

import jax.numpy as jnp

__all__ = ["cut", "padded", "zero_after"]


def cut(group_sizes: Any, rows: int) -> Any:
    """Returns the sizes in int32, cut off at the number of rows."""
    # This sum does not overflow: the op cuts sizes off before it calls an implementation.
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def padded(rows: Any, tile: int) -> Any:
    """Pads rows with zeros to full tiles."""
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)))


def zero_after(sizes: Any, rows: Any) -> Any:
    """Zeroes the rows after the last group."""
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), rows, 0).astype(rows.dtype)
