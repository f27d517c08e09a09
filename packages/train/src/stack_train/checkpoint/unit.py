"""Contents of one checkpoint, and reads of its single arrays with TensorStore."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_train.checkpoint.leaves import spec_of
from stack_train.checkpoint.narrow import is_packed, splits_bytes, unpacked

__all__ = ["Unit", "part_directory", "read_array", "read_stored"]


@dataclass
class Unit:
    """The arrays and documents of one checkpoint.

    Attributes:
      parts: groups of arrays by name. Each group is on disk before the next is requested, which bounds the memory
        of a lazy iterable.
      documents: function called after the last part; returns the content of every other file, by name.
    """

    parts: Iterable[Mapping[str, Any]]
    documents: Callable[[], Mapping[str, bytes]]


def read_array(checkpoint: Path, part: int, name: str, leaf: Any) -> Any:
    """Reads one array in the form that `leaf` describes.

    If the leaf has a sharding, each process reads only the shards of its devices. Without a sharding the array goes to
    the default device, and NumPy arrays and Python numbers stay on the host. Typed keys are restored as keys. A packed
    array is first read in full to the default device if a shard boundary falls inside a byte.

    This reads with TensorStore directly: on a damaged checkpoint, Orbax's reader leaves coroutines and callbacks
    behind that raise later, outside any `try`.
    """
    stored = _opened(checkpoint, part, name)
    sharding = _sharding(leaf)
    wanted = spec_of(leaf)
    if is_packed(wanted.dtype):
        split = sharding is not None and not splits_bytes(sharding, wanted.shape, wanted.dtype)
        content = jnp.asarray(_read_to(stored, sharding if split else None))
        array = unpacked(content, wanted.shape, wanted.dtype)
        return array if sharding is None else jax.device_put(array, sharding)
    return _like(_read_to(stored, sharding), leaf)


def read_stored(checkpoint: Path, part: int, name: str) -> np.ndarray:
    """Reads one array to the host in its stored form, see `stored_array`."""
    return np.asarray(_read_to(_opened(checkpoint, part, name), None))


def _opened(checkpoint: Path, part: int, name: str) -> Any:
    import tensorstore  # not needed to serve other formats

    files = {"driver": "file", "path": f"{part_directory(checkpoint, part)}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": files, "path": f"{name}/"}}
    return tensorstore.open(spec, open=True, read=True).result()


def _read_to(stored: Any, sharding: jax.sharding.Sharding | None) -> np.ndarray | jax.Array:
    """Reads an array with `sharding`, each device its own shard; if None, reads the full array to the host."""
    if sharding is None:
        return stored.read().result()
    shape = tuple(stored.shape)
    indices = sharding.addressable_devices_indices_map(shape).values()
    # Keyed by their repr, because slices are not hashable before Python 3.12. Replicas share one read.
    reads = {str(index): stored[index].read() for index in indices}
    return jax.make_array_from_callback(shape, sharding, lambda index: reads[str(index)].result())


def part_directory(checkpoint: Any, part: int) -> Any:
    """Returns the directory of the arrays of one part."""
    return checkpoint / "arrays" / str(part)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding requested by a leaf, or None for an uncommitted array."""
    # JAX gives every array a sharding; only a committed one was chosen by the caller.
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _like(array: Any, leaf: Any) -> Any:
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(array.item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    array = array if isinstance(array, jax.Array) else jnp.array(array)
    impl = spec_of(leaf).key_impl
    return jax.random.wrap_key_data(array, impl=impl) if impl else array
