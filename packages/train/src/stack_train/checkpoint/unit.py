"""One checkpoint on disk through Orbax: arrays and documents written as a unit, arrays read back to their places."""

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
from stack_train.checkpoint.narrow import is_narrow, splits_bytes, unpacked

__all__ = ["Unit", "make_checkpointer", "read_array"]

_TIMEOUT_S = 4 * 3600


def make_checkpointer() -> ocp.AsyncCheckpointer:
    """Returns a checkpointer that saves a `Unit` in the background and makes it visible by one rename."""
    options = ocp.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False)
    store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    return ocp.AsyncCheckpointer(_UnitHandler(), async_options=options, checkpoint_metadata_store=store)


class _UnitHandler(ocp.AsyncCheckpointHandler):
    """Writes the parts of a `Unit` with Orbax's pytree handler and its documents beside them."""

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
            del part  # or it would stay in memory until the iterator has made the next
        if jax.process_index() == 0:
            for name, content in unit.documents().items():
                (directory / name).write_bytes(content)
        return futures

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Units are saved by an AsyncCheckpointer.")

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Arrays are read by read_array.")

    def finalize(self, directory: Any) -> None:
        """Joins what the processes wrote, and sees it to the disk before the rename that makes it visible."""
        for folder in (directory / "arrays").iterdir():
            self._arrays.finalize(folder)
        _sync_tree(Path(directory))

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(_UnitHandler, for_save=True, for_restore=True)
@dataclass
class Unit(ocp.args.CheckpointArgs):
    """What is saved together.

    Attributes:
      parts: groups of arrays by name; each is on disk before the next is asked for, so that an iterator bounds memory.
      documents: called after the last part, returns the content of every other file by its name.
    """

    parts: Iterable[Mapping[str, Any]]
    documents: Callable[[], Mapping[str, bytes]]


def read_array(checkpoint: Path, part: int, name: str, leaf: Any) -> Any:
    """Reads one array to where `leaf` asks for it.

    A leaf with a sharding is read to that sharding, each device its own part; one without comes to the default device,
    and a NumPy array or a Python number stays on the host. Typed keys are read as keys. What is stored as bytes comes
    whole to the default device before it is split where a byte holds elements of two devices.

    It goes to TensorStore, which Orbax wrote with, directly: of a damaged checkpoint Orbax's reader leaves coroutines
    and callbacks behind whose exceptions surface later, where nobody can catch them.
    """
    files = {"driver": "file", "path": f"{_part_directory(checkpoint, part)}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": files, "path": f"{name}/"}}
    stored = tensorstore.open(spec, open=True, read=True).result()
    sharding = _sharding(leaf)
    wanted = spec_of(leaf)
    if is_narrow(wanted.dtype):
        split = sharding is not None and not splits_bytes(sharding, wanted.shape, wanted.dtype)
        content = jnp.asarray(_read_to(stored, sharding if split else None))
        array = unpacked(content, wanted.shape, wanted.dtype)
        return array if sharding is None else jax.device_put(array, sharding)
    return _as_asked(_read_to(stored, sharding), leaf)


def _read_to(stored: Any, sharding: jax.sharding.Sharding | None) -> np.ndarray | jax.Array:
    """Reads each device's part to it; without a sharding, all to the host."""
    if sharding is None:
        return stored.read().result()
    shape = tuple(stored.shape)
    indices = sharding.addressable_devices_indices_map(shape).values()
    # By their text, as slices are no keys before Python 3.12; replicas share one read.
    reads = {str(index): stored[index].read() for index in indices}
    return jax.make_array_from_callback(shape, sharding, lambda index: reads[str(index)].result())


def _part_directory(checkpoint: Any, part: int) -> Any:
    return checkpoint / "arrays" / str(part)


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # Trained weights hardly compress, and zstd would take the CPU from the training that goes on meanwhile.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding a leaf asks for; an array that JAX placed by default asks for none."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _as_asked(array: Any, leaf: Any) -> Any:
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(array.item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    array = array if isinstance(array, jax.Array) else jnp.array(array)
    impl = spec_of(leaf).key_impl
    return jax.random.wrap_key_data(array, impl=impl) if impl else array


def _sync_tree(directory: Path) -> None:
    """Flushes every file and folder under `directory`, which also brings up a full disk that a write did not report."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder) / name for name in names), Path(folder)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
