"""Arrays that are sharded over several processes: their complete copies, and their placement from such copies."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["gathered", "place_copies"]


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


def place_copies(tree: Any, shardings: Any) -> Any:
    """Places arrays of which every process has a copy, or that are placed already; not a collective.

    For shardings over several processes, `jax.device_put` compares the copies by a collective for each array, which all
    processes must reach in the same order.

    Args:
      tree: pytree of arrays.
      shardings: sharding of all arrays, or of each in the structure of `tree`; None is the default device for all.
    """
    places = jax.tree.leaves(shardings)
    if all(place.is_fully_addressable for place in places):
        return jax.device_put(tree, shardings)
    leaves, structure = jax.tree.flatten(tree)
    places = places * len(leaves) if len(places) == 1 else places
    return jax.tree.unflatten(structure, [_place_copy(*each) for each in zip(leaves, places, strict=True)])


def _place_copy(array: Any, sharding: Any) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


@functools.lru_cache(maxsize=8)
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
