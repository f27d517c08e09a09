"""Automatic sharding of parts of programs on meshes with Explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["with_automatic_axes"]


def with_automatic_axes(fn: Callable[..., Any], *args: Any, like: Any) -> Any:
    """Computes `fn(*args)` with the Explicit axes of the mesh of `like` turned into Auto axes.

    Programs that split an axis into tiles cannot be written for Explicit axes if the size of a shard is not a multiple
    of the tile. Each result is sharded as `like` along every axis whose size the number of shards divides.

    Args:
      fn: function of `args` that returns a pytree of arrays.
      args: pytrees of arrays.
      like: array with the rank of all results.
    """
    sharding = jax.typeof(like).sharding
    mesh = sharding.mesh
    names = tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    if not names:
        return fn(*args)

    def spec(result: jax.ShapeDtypeStruct) -> NamedSharding:
        parts = zip(result.shape, sharding.spec, strict=True)
        fitting = (part if size % _shards(mesh, part) == 0 else None for size, part in parts)
        return NamedSharding(mesh, PartitionSpec(*fitting))

    # Without shardings: the abstract evaluation would fail on Explicit axes like the function itself.
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), args)
    specs = jax.tree.map(spec, jax.eval_shape(fn, *shapes))
    return jax.sharding.auto_axes(fn, axes=names, out_sharding=specs)(*args)


def _shards(mesh: Any, part: Any) -> int:
    """Returns the number of shards along an axis with this entry of a PartitionSpec."""
    count = 1
    for name in (part,) if isinstance(part, str) else part or ():
        count *= mesh.shape[name]
    return count
