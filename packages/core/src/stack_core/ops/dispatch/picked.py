"""Selection of one element per row."""

from typing import Any

import jax
import jax.numpy as jnp

from stack_core.chips.context import target_platform

__all__ = ["picked"]


def picked(x: Any, places: Any) -> Any:
    """Returns x[r, places[r]] for x [rows, columns]; NaN for places out of range.

    On accelerators it computes a masked sum: its gradient is a comparison that fuses with what consumes it, and the
    gradient of a gather is a scatter. So it does inside a `jax.shard_map` over some axes of a mesh: XLA's partitioner
    fails on a gather with rows sharded over the other axes (jax 0.10.2: "Check failed: num_replica_groups").
    """
    if target_platform() == "cpu" and not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.take_along_axis(x, places[:, None], axis=-1, mode="fill")[:, 0]
    columns = jnp.arange(x.shape[-1], dtype=places.dtype)
    found = jnp.sum(jnp.where(columns == places[:, None], x, 0), axis=-1)
    return jnp.where((places >= 0) & (places < x.shape[-1]), found, jnp.nan)
