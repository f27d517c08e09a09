"""Kernels of others inside `jax.shard_map`, where JAX tracks over which mesh axes each array varies."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.config import _check_vma  # the switch that `jax.shard_map(check_vma=False)` sets while it traces

from stack_core.ops.building import vary_alike

__all__ = ["untyped"]


def untyped(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """`kernel(*arrays)` for a kernel that says nothing of mesh axes; its results vary as the arrays together do.

    A Pallas call inside `jax.shard_map` must type its results, and kernels that were not written for one do not. Such a
    kernel has no collectives, so that whatever varies over an axis gives results that vary over it.
    """
    with _check_vma(False):
        found = kernel(*arrays)
    leaves = jax.tree.leaves(arrays)
    results = [vary_alike(result, *leaves)[0] for result in jax.tree.leaves(found)]
    return jax.tree.unflatten(jax.tree.structure(found), results)
