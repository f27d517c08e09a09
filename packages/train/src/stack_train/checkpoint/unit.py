"""One checkpoint on disk through Orbax: atomic writes of arrays and documents, and reads of single arrays."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from stack_train.checkpoint.leaves import spec_of
from stack_train.checkpoint.narrow import is_packed, splits_bytes, unpacked

__all__ = ["Unit", "make_checkpointer", "read_array", "read_stored"]

# Orbax aborts a save after this time. Its default of 20 minutes is too short for large states on slow disks.
_TIMEOUT_S = 4 * 3600


def make_checkpointer() -> ocp.AsyncCheckpointer:
    """Returns a checkpointer that writes a `Unit` in the background and publishes it with a single rename."""
    options = ocp.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False)
    store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    return ocp.AsyncCheckpointer(_UnitHandler(), async_options=options, checkpoint_metadata_store=store)


class _UnitHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler of a `Unit`: arrays go through Orbax's pytree handler, documents are plain files."""

    def __init__(self) -> None:
        self._arrays = _array_handler()

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns once the last part is copied to the host; the futures complete when it is on disk."""
        unit: Unit = kwargs["args"]
        futures: list[Any] = []
        for index, part in enumerate(unit.parts):
            for future in futures:
                future.result()
            folder = _part_directory(directory, index)
            folder.mkdir(parents=True, exist_ok=True)
            futures = await self._arrays.async_save(folder, args=ocp.args.PyTreeSave(dict(part))) or []
            del part  # Otherwise it stays in memory while the iterator produces the next part.
        # The documents are the same on all processes.
        if jax.process_index() == 0:
            for name, content in unit.documents().items():
                (directory / name).write_bytes(content)
        return futures

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Units are saved by an AsyncCheckpointer.")

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Arrays are read by read_array.")

    def finalize(self, directory: Any) -> None:
        """Merges the files of all processes and flushes them to disk before Orbax's final rename."""
        for folder in (directory / "arrays").iterdir():
            self._arrays.finalize(folder)
        _sync_tree(Path(directory))

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(_UnitHandler, for_save=True, for_restore=True)
@dataclass
class Unit(ocp.args.CheckpointArgs):
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
    files = {"driver": "file", "path": f"{_part_directory(checkpoint, part)}/"}
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


def _part_directory(checkpoint: Any, part: int) -> Any:
    return checkpoint / "arrays" / str(part)


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # Trained weights hardly compress, and zstd would compete with training for the CPU.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)


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


def _sync_tree(directory: Path) -> None:
    """Flushes every file and folder under `directory`; this also raises delayed write errors such as a full disk."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder) / name for name in names), Path(folder)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
