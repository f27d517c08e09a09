"""Transfer of host batches to the devices of a mesh, with one or several processes."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import Batch, Shapes
from stack_train.step.program import Program

__all__ = ["local_rows", "shard_batch"]


def local_rows(program: Program, shapes: Shapes) -> Int64[np.ndarray, " own"]:
    """Returns the rows of a batch on the devices of this process, in ascending order.

    Args:
      shapes: global shapes of the arrays of a batch.
    """
    name, first = next(iter(shapes.items()))
    places = program.batch_shardings({name: first})[name].addressable_devices_indices_map(first.shape)
    size = first.shape[0]
    # Devices that are replicas list the same rows.
    return np.unique([row for index in places.values() for row in range(*_bounds(index, size))]).astype(np.int64)


def shard_batch(
    program: Program, batch: Batch, *, rows: Int64[np.ndarray, " own"] | None = None, shapes: Shapes | None = None
) -> dict[str, jax.Array]:
    """Transfers a batch to the devices of a program's mesh.

    Args:
      rows: indices in a full global batch of the rows that this process holds; None for processes that hold all rows.
        A smaller batch of `run.ramp` has every k-th row of a full one.
      shapes: global shapes of the arrays of a full batch; required with `rows`.
    """
    # A process may hold only its own rows, and `device_put` takes complete arrays.
    if program.mesh.is_multi_process:
        wholes: Mapping[str, Any] = batch
        if rows is not None and shapes is not None:
            rows, wholes = _of_batch(batch, rows, shapes)
        shardings = program.batch_shardings(wholes)
        return {name: _part(array, wholes[name].shape, shardings[name], rows) for name, array in batch.items()}
    return jax.device_put(dict(batch), program.batch_shardings(batch))


def _of_batch(
    batch: Batch, rows: Int64[np.ndarray, " own"], shapes: Shapes
) -> tuple[Int64[np.ndarray, " own"], dict[str, jax.ShapeDtypeStruct]]:
    """Returns the rows of a batch, full or smaller, that this process holds, and the batch's global shapes."""
    parts = max(1, len(rows) // len(next(iter(batch.values()))))
    wholes = {name: shapes[name] for name in batch}
    return np.unique(rows // parts), {
        name: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype) for name, x in wholes.items()
    }


def _part(
    array: np.ndarray, shape: tuple[int, ...], sharding: jax.sharding.Sharding, rows: np.ndarray | None
) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        first, end = _bounds(index, shape[0])
        # A device's rows are adjacent in `rows`, since both are ascending.
        place = first if rows is None else int(np.searchsorted(rows, first))
        return array[place : place + end - first]

    return jax.make_array_from_callback(shape, sharding, part)


def _bounds(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    """Returns the first and the end row of a device's shard; batches are sharded along their leading axis only."""
    first, end, _ = (slice(None) if index is None else index[0]).indices(size)
    return first, end
