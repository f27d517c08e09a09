"""Checkpoints of one run: saved atomically in the background, verified when read."""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import CheckpointDamaged, CheckpointError, StackError, TrainingError
from stack_core.abi.events import CheckpointRestored, CheckpointSaved, CheckpointSkipped, Event
from stack_core.runtime.digest import array_digests
from stack_core.runtime.processes import ALONE, Processes
from stack_train.checkpoint.directory import CheckpointDirectory
from stack_train.checkpoint.frozen import FROZEN, FrozenRecord, frozen_document, frozen_records
from stack_train.checkpoint.leaves import named_leaves, spec_of, stored_array
from stack_train.checkpoint.manifest import LeafRecord, read_manifest, sealed_documents
from stack_train.checkpoint.reading import CONFIG, DATA_BYTES, DATA_JSON, data_state_of, read_state, read_variables
from stack_train.checkpoint.unit import Unit
from stack_train.checkpoint.weights import weight_parts

__all__ = ["CheckpointConfig", "CheckpointStore", "Restored"]

_SLACK_BYTES = 1 << 20  # allowance for files whose size is unknown before they are written, such as Orbax's metadata


@config
class CheckpointConfig:
    """Interval and retention of checkpoints.

    Attributes:
      every_steps: number of training steps between checkpoints; 0 saves only after the last step.
      keep: number of intact checkpoints on disk; older checkpoints are deleted once a newer one is durable. Checkpoints
        found to be damaged do not count.
      background: True writes during training; False makes training wait for the disk.
    """

    every_steps: NonNegativeInt = 500
    keep: PositiveInt = 3
    background: bool = True


@dataclass(frozen=True)
class Restored:
    """Contents read from a checkpoint.

    Attributes:
      step: number of training steps done.
      state: restored pytree, in the requested structure.
      data_state: state of the data iterator; None after reading only parameters.
      config_yaml: resolved config of the run that saved the checkpoint.
      frozen: records of the frozen variables, by model ("model" or a companion's name).
      kind: kind of the checkpoint, "train" or "weights".
    """

    step: int
    state: Any
    data_state: dict[str, Any] | bytes | None
    config_yaml: str
    frozen: Mapping[str, FrozenRecord] = field(default_factory=dict)
    kind: str = "train"


@dataclass(frozen=True)
class _InFlight:
    """A checkpoint that the background is writing; `blocked_s` is how long `save` took."""

    step: int
    path: Path
    needed_bytes: int
    blocked_s: float = 0.0


class CheckpointStore:
    """Saves and restores the state of one run under one directory.

    Invariants that hold even if the process is killed at any moment: a directory named after a step is complete, no
    checkpoint is deleted because it is damaged, and the newest complete checkpoint is never deleted. Errors of the
    background thread are raised by the next call of `save`, `poll`, `wait` or `close`. `RunDirectory` ensures that
    only one process at a time writes to a directory.

    Args:
      directory: directory of the checkpoints, created by the first save.
      emit: receives `CheckpointSaved`, `CheckpointRestored` and `CheckpointSkipped` on the caller's thread.
      processes: processes that save and restore together, each its own shards; only the first manages the directory.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig | None = None,
        *,
        emit: Callable[[Event], None] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.config = config or CheckpointConfig()
        self._directory = CheckpointDirectory(Path(directory).resolve())  # TensorStore takes no `..`
        self._emit = emit or (lambda event: None)
        self._processes = processes
        # Here, because models of other formats are served without Orbax, whose import takes a second.
        from stack_train.checkpoint.writer import UnitWriter

        self._checkpointer = UnitWriter()
        self._in_flight: _InFlight | None = None
        self._current_step: int | None = None
        self._damaged: set[int] = set()  # steps of checkpoints that could not be restored

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, oldest first."""
        return self._directory.steps()

    def leaf_names(self, step: int) -> tuple[str, ...]:
        """Returns the paths of all leaves in the checkpoint of `step`."""
        return tuple(read_manifest(self.path(step)).leaves)

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None without checkpoints."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Returns the directory of the checkpoint of `step`, which need not exist."""
        return self._directory.path(step)

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any] | bytes | None = MappingProxyType({}),
        config_yaml: str = "",
        *,
        frozen: Mapping[str, FrozenRecord] | None = None,
        kind: str = "train",
    ) -> None:
        """Saves a state; returns once the state is copied to the host, after which the caller may donate the arrays.

        Saving the step that was last saved or restored does nothing. Any other checkpoint of this or a later step is
        damaged or left from an abandoned course of training: it is renamed, with a warning.

        Args:
          step: number of training steps done.
          state: pytree of JAX arrays (including typed keys), NumPy arrays and numbers.
          data_state: state of the data iterator, as a JSON mapping or as bytes; None prevents resuming.
          config_yaml: resolved config of the run.
          frozen: records of the frozen variables that `state` omits, by model.
          kind: "train", or "weights" if `state` holds only parameters.

        Raises:
          CheckpointError: this save or the previous one failed; the message gives the bytes needed and free.
        """
        started_s = time.perf_counter()
        # `_in_flight` holds one save, so the previous one is finished and reported first.
        self.wait()
        if step == self._current_step:
            return
        leaves = named_leaves(state)
        arrays = {name: stored_array(leaf) for name, leaf in leaves.items()}
        digests = array_digests(arrays)
        records = {name: LeafRecord(spec_of(leaf), digests[name], part=0) for name, leaf in leaves.items()}
        documents = sealed_documents(step, kind, records, _documents(data_state, config_yaml, frozen))
        needed_bytes = sum(array.nbytes for array in arrays.values()) + sum(map(len, documents.values())) + _SLACK_BYTES
        self._start(_InFlight(step, self.path(step), needed_bytes), Unit((arrays,), lambda: documents), started_s)
        if not self.config.background:
            self.wait()

    def save_weights(
        self,
        leaves: Iterable[tuple[str, Any]],
        config_yaml: str,
        *,
        step: int = 0,
        total_bytes: int = 0,
        part_bytes: int = 1 << 29,
    ) -> None:
        """Saves only parameters, as a checkpoint of kind "weights" for `restore_params`; blocks until it is durable.

        Args:
          leaves: pairs of a parameter's path below "params" and its JAX or NumPy array, such as the items of
            `named_leaves`. The iterable is consumed lazily, and each array is released once written.
          total_bytes: total size of the arrays, for a check of the free disk space before writing; 0 if unknown.
          part_bytes: size of the groups in which arrays are written. Memory holds at most two groups, or two leaves
            that are larger.

        Raises:
          CheckpointError: writing failed, or `leaves` raised an exception other than a `StackError`, which propagates.
            Either way the partial checkpoint is deleted.
        """
        self.wait()
        records: dict[str, LeafRecord] = {}
        unit = Unit(
            weight_parts(leaves, records, part_bytes),
            lambda: sealed_documents(step, "weights", records, {CONFIG: config_yaml.encode()}),
        )
        self._start(_InFlight(step, self.path(step), total_bytes + _SLACK_BYTES), unit, time.perf_counter())
        self.wait()

    def poll(self) -> None:
        """Reports a save that has finished or failed, without blocking; call it at every step.

        Raises:
          CheckpointError: the save failed.
        """
        flight = self._in_flight
        if flight is None:
            return
        try:
            self._checkpointer.check_for_errors()
        except Exception as error:  # As in `wait`.
            raise self._failed(flight, error) from error
        # Orbax renames the directory last, so if it exists, `wait` does not block.
        if flight.path.exists():
            self.wait()

    def wait(self) -> None:
        """Waits until the save in flight is durable, then deletes checkpoints older than the `keep` newest intact ones.

        Intact means here: it has a valid manifest, and this store has not found damage when restoring.

        Raises:
          CheckpointError: the save failed.
        """
        flight = self._in_flight
        if flight is None:
            return
        try:
            self._processes.call(self._checkpointer.wait_until_finished)
            if self._processes.first:
                self._directory.delete(self._excess_steps())
        except TrainingError:  # The failure of another process, propagated by `Processes.call`.
            raise
        except Exception as error:  # Orbax, TensorStore and the layers below raise exceptions of any type.
            raise self._failed(flight, error) from error
        self._in_flight = None
        self._current_step = flight.step
        self._emit(CheckpointSaved(flight.step, flight.path, flight.blocked_s))

    def close(self) -> None:
        """Waits for the save in flight and frees the background's threads.

        Raises:
          CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Restores a state for resuming training.

        Damaged and partial checkpoints are skipped with a warning and a `CheckpointSkipped` event.

        Args:
          abstract_state: pytree with the saved structure, of `jax.ShapeDtypeStruct`s, arrays or numbers. Each array
            is restored with the sharding of its leaf.
          step: step of the checkpoint to restore; None selects the newest intact checkpoint.

        Raises:
          CheckpointDamaged: the checkpoint of `step` is not intact.
          CheckpointIncomplete: the checkpoint does not hold the state of the data iterator.
          CheckpointError: the directory does not have an intact checkpoint (lists each with its damage), or the leaves
            differ from `abstract_state` (lists each difference).
        """

        def read(path: Path) -> Restored:
            manifest, documents, state = read_state(path, abstract_state, processes=self._processes)
            data_state = data_state_of(path, documents)
            return Restored(manifest.step, state, data_state, documents[CONFIG].decode(), frozen_records(documents))

        restored = self._newest_intact(read, step)
        self._current_step = restored.step
        return restored

    def restore_params(self, abstract_params: Any, step: int | None = None, *, under: str = "params") -> Restored:
        """Restores the branch `under` of a checkpoint of any kind, with floats cast to the requested dtypes."""

        def read(path: Path) -> Restored:
            manifest, documents, params = read_state(
                path, abstract_params, under=under, cast=True, processes=self._processes
            )
            return Restored(manifest.step, params, None, documents[CONFIG].decode())

        return self._newest_intact(read, step)

    def restore_variables(self, abstract: Any, step: int | None = None) -> Restored:
        """Restores a model's variables from a checkpoint of any kind, with floats cast to the requested dtypes.

        Args:
          abstract: nested dicts of the shapes and dtypes of all variables. Frozen variables that the checkpoint
            omits are restored as None.
        """

        def read(path: Path) -> Restored:
            manifest, documents, variables = read_variables(path, abstract, processes=self._processes)
            config_yaml, frozen = documents[CONFIG].decode(), frozen_records(documents)
            return Restored(manifest.step, variables, None, config_yaml, frozen, manifest.kind)

        return self._newest_intact(read, step)

    def _start(self, flight: _InFlight, unit: Unit, started_s: float) -> None:
        try:
            self._processes.on_first("room for a checkpoint", lambda: self._make_room(flight))
            self._processes.call(lambda: self._checkpointer.save_unit(flight.path, unit))
        # Raised by `leaves` or propagated from another process; the storage has not failed.
        except StackError:
            if self._processes.first:
                self._directory.remove_partial()
            raise
        except Exception as error:  # As in `wait`.
            raise self._failed(flight, error) from error
        self._in_flight = replace(flight, blocked_s=time.perf_counter() - started_s)

    def _excess_steps(self) -> list[int]:
        # A damaged checkpoint is useless as a fallback, so it does not count; it is deleted by age like an intact one.
        intact = [step for step in self.steps() if step not in self._damaged and self._has_manifest(step)]
        if len(intact) < self.config.keep:
            return []
        return [step for step in self.steps() if step < intact[-self.config.keep]]

    def _has_manifest(self, step: int) -> bool:
        try:
            read_manifest(self.path(step))
        except CheckpointDamaged:
            return False
        except CheckpointError:  # written by a newer version
            pass
        return True

    def _make_room(self, flight: _InFlight) -> None:
        self._directory.prepare(flight.step)
        self._damaged = {step for step in self._damaged if step < flight.step}  # `prepare` set later ones aside
        # A full disk would otherwise end the save only after most of the state is written.
        if shutil.disk_usage(self._directory.root).free < flight.needed_bytes:
            raise OSError("not enough free disk space")

    def _failed(self, flight: _InFlight, error: Exception) -> CheckpointError:
        """Deletes the partial checkpoint of a failed save and returns the error to raise."""
        # Otherwise `close` would report the same failure again.
        self._in_flight = None
        root = self._directory.root
        try:
            if self._processes.first:
                self._directory.remove_partial()
            free = f"{shutil.disk_usage(root).free:,} are free"
        except OSError as cleaning_error:
            free = f"the partial checkpoint could not be removed ({cleaning_error})"
        intact = ", ".join(map(str, self.steps())) or "none"
        return CheckpointError(
            f"Checkpoint {flight.path} could not be saved: {type(error).__name__}: {error}. "
            f"It needs {flight.needed_bytes:,} bytes or more; {free}. Checkpoints on disk, by step: {intact}. "
            "Free some space or lower checkpoint.keep, then resume with --resume."
        )

    def _newest_intact(self, read: Callable[[Path], Restored], step: int | None) -> Restored:
        self.wait()
        if step is not None:
            return self._announced(read(self.path(step)))
        failures = {path: "its saving was interrupted" for _, path in self._directory.partial()}
        # One process lists them for all, because a shared file system may show processes different entries.
        newest_first = self._processes.on_first("checkpoints", lambda: sorted(self.steps(), reverse=True))
        for candidate in newest_first:
            path = self.path(candidate)
            try:
                restored = read(path)
            except CheckpointDamaged as error:
                failures[path] = str(error)
                self._damaged.add(candidate)
                continue
            for skipped, reason in failures.items():
                self._report_skipped(skipped, reason, restored.step)
            return self._announced(restored)
        listing = "".join(f"\n{path}: {reason}" for path, reason in failures.items())
        raise CheckpointError(f"{self._directory.root} does not hold a usable checkpoint.{listing}")

    def _report_skipped(self, path: Path, reason: str, used_step: int) -> None:
        # An older damaged checkpoint did not affect the choice, so it needs no warning.
        if int(path.name.partition(".")[0]) < used_step:
            return
        warnings.warn(f"Checkpoint {path} is skipped in favor of step {used_step}: {reason}", stacklevel=5)
        self._emit(CheckpointSkipped(path, reason))

    def _announced(self, restored: Restored) -> Restored:
        self._emit(CheckpointRestored(restored.step, self.path(restored.step)))
        return restored


def _documents(
    data_state: Mapping[str, Any] | bytes | None, config_yaml: str, frozen: Mapping[str, FrozenRecord] | None
) -> dict[str, bytes]:
    documents = {CONFIG: config_yaml.encode()}
    if frozen:
        documents[FROZEN] = frozen_document(frozen)
    if isinstance(data_state, bytes):
        documents[DATA_BYTES] = data_state
    elif data_state is not None:
        documents[DATA_JSON] = json.dumps(dict(data_state)).encode()
    return documents
