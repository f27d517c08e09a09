"""Copies of arrays that are sharded over the processes of a run, complete in each process."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["gathered"]


def gathered(tree: Any) -> Any:
    """Returns a tree whose arrays are whole on the first device of each process.

    A collective: all processes of the mesh call it with the same tree. The results may share buffers with arrays that
    were replicated already.

    Args:
      tree: pytree of arrays on one mesh over several processes; returned unchanged if this process addresses all of it.
    """
    leaves = jax.tree.leaves(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return tree
    whole = _replicate(leaves[0].sharding.mesh)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


@functools.lru_cache(maxsize=8)
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
