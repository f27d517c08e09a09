"""Atomic writes of checkpoints through Orbax, whose import takes as long as that of Flax."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from stack_train.checkpoint.unit import Unit, part_directory

__all__ = ["UnitWriter"]

# Orbax aborts a save after this time. Its default of 20 minutes is too short for large states on slow disks.
_TIMEOUT_S = 4 * 3600


class UnitWriter(ocp.AsyncCheckpointer):
    """Checkpointer that writes a `Unit` in the background and publishes it with a single rename."""

    def __init__(self) -> None:
        options = ocp.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False)
        store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        super().__init__(_UnitHandler(), async_options=options, checkpoint_metadata_store=store)

    def save_unit(self, directory: Path, unit: Unit) -> None:
        """Starts to write a checkpoint; returns once its last part is copied to the host."""
        self.save(directory, args=_UnitArgs(unit))


class _UnitHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler of a `Unit`: arrays go through Orbax's pytree handler, documents are plain files."""

    def __init__(self) -> None:
        self._arrays = _array_handler()

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns once the last part is copied to the host; the futures complete when it is on disk."""
        unit: Unit = kwargs["args"].unit
        futures: list[Any] = []
        for index, part in enumerate(unit.parts):
            for future in futures:
                future.result()
            folder = part_directory(directory, index)
            folder.mkdir(parents=True, exist_ok=True)
            futures = await self._arrays.async_save(folder, args=ocp.args.PyTreeSave(dict(part))) or []
            del part  # Otherwise it stays in memory while the iterator produces the next part.
        # The documents are the same on all processes.
        if jax.process_index() == 0:
            for name, content in unit.documents().items():
                (directory / name).write_bytes(content)
        return futures

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("Units are saved by a UnitWriter.")

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
class _UnitArgs(ocp.args.CheckpointArgs):
    unit: Unit


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    # Trained weights hardly compress, and zstd would compete with training for the CPU.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)


def _sync_tree(directory: Path) -> None:
    """Flushes every file and folder under `directory`; this also raises delayed write errors such as a full disk."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder) / name for name in names), Path(folder)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
