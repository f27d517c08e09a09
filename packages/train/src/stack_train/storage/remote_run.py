"""A run whose directory is in object storage, with a local copy for training.

The run works in the local copy like any other run. Each checkpoint is uploaded in the background once it is durable;
its manifest is uploaded last, so a checkpoint with a manifest is complete. The remaining files of the run follow
each checkpoint. To resume, a newer local checkpoint of the same course is uploaded, and the local copy is downloaded
again.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final

from stack_core.abi.errors import CheckpointError, RunDirectoryError, StackError
from stack_core.abi.run_directory import RunDirectory
from stack_core.abi.user_cache import user_cache_dir
from stack_train.storage.address import is_storage
from stack_train.storage.bucket import Bucket

__all__ = ["RemoteRun", "local_copy", "run_path"]

_CONFIG: Final = "config.yaml"
_CHECKPOINTS: Final = "checkpoints"
_MANIFEST: Final = "manifest.json"
_SET_ASIDE: Final = "manifest.set-aside.json"
_NOT_UPLOADED: Final = {"run.lock", _CHECKPOINTS}


def run_path(output: str) -> Path:
    """Returns the local directory of a run: `output` itself, or the local copy of an address of object storage."""
    if not is_storage(output):
        return Path(output)
    return user_cache_dir() / "runs" / hashlib.sha256(output.encode()).hexdigest()[:24]


def local_copy(address: str) -> Path:
    """Downloads the config, the tokenizer and the newest checkpoint of a run; returns the local directory.

    Files that were downloaded before are used again if the checkpoint is the same.

    Raises:
      RunDirectoryError: the address does not contain a run, or cannot be read.
      CheckpointError: the run does not have a complete checkpoint.
    """
    bucket = Bucket(address)
    _check_run(bucket)
    if (step := max(_complete_steps(bucket), default=None)) is None:
        raise CheckpointError(f"{address!r} has no complete checkpoint to start from.")
    directory = user_cache_dir() / "starts" / hashlib.sha256(address.encode()).hexdigest()[:24]
    # Several processes of a run may download at the same time, and must not replace a copy that another one reads.
    with (_made(directory.parent) / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _has_checkpoint(bucket, directory, step):
            _download(bucket, directory, step)
    return directory


class RemoteRun:
    """The storage of one run; used in the process that writes the run's files.

    Args:
      address: `output` of the run, such as "s3://bucket/run".
      keep: number of complete checkpoints in the storage; older ones are deleted.
    """

    def __init__(self, address: str, *, keep: int) -> None:
        self.address, self.path = address, run_path(address)
        self._keep = keep
        self._bucket = Bucket(address)
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._pending: Future[list[int]] | None = None

    def prepare(self, *, resume: bool) -> None:
        """Checks the storage and makes the local copy, before anything is trained.

        Raises:
          RunDirectoryError: the storage refuses writes, holds another run, or holds nothing to resume; or a process of
            this machine trains the run.
        """
        self._bucket.check_writable()
        # Raises if another process of this machine holds the lock of the local copy.
        local = RunDirectory(self.path)
        if self.path.exists():
            local.check(resume=local.config.exists())
        if not resume:
            if self._bucket.exists(_CONFIG):
                raise RunDirectoryError(
                    f"{self.address} holds another run. Continue it with --resume, or choose another output."
                )
            shutil.rmtree(self.path, ignore_errors=True)
            return
        _check_run(self._bucket)
        self._upload_newer()
        _download(self._bucket, self.path, max(_complete_steps(self._bucket), default=None))

    def _upload_newer(self) -> None:
        """Uploads the newest local checkpoint if it continues the newest checkpoint of the storage.

        The session that wrote it may have ended before it was uploaded. Meanwhile another machine may have continued
        from an earlier checkpoint, or started another run here. So the local copy must have the newest checkpoint of
        the storage, too, or the same config if the storage lacks checkpoints.
        """
        stored = max(_complete_steps(self._bucket), default=None)
        names = (path.parent.name for path in self.path.glob(f"{_CHECKPOINTS}/*/{_MANIFEST}"))
        local = max((int(name) for name in names if name.isdecimal()), default=None)
        if local is None or local <= (-1 if stored is None else stored):
            return
        if stored is None:
            config = self.path / _CONFIG
            is_same = config.is_file() and config.read_bytes() == self._bucket.read(_CONFIG)
        else:
            is_same = _has_checkpoint(self._bucket, self.path, stored)
        if is_same:
            self.checkpoint_saved(local)
            self.wait()

    def checkpoint_saved(self, step: int) -> None:
        """Uploads a durable checkpoint in the background, after the previous upload has finished.

        Raises:
          CheckpointError: the previous upload failed.
        """
        self.wait()
        source = self.path / _CHECKPOINTS / f"{step:08d}"
        # Links keep the files until they are uploaded, even if the run deletes the checkpoint.
        linked = Path(tempfile.mkdtemp(prefix=".upload-", dir=self.path)) / source.name
        shutil.copytree(source, linked, copy_function=os.link)
        self._pending = self._thread.submit(self._upload_checkpoint, step, linked)

    def upload_files(self) -> None:
        """Uploads the run's files that changed, other than checkpoints, and deletes a config that is gone here.

        Raises:
          RunDirectoryError: the storage refuses.
        """
        changed: dict[str, Path] = {}
        sizes: dict[str, tuple[int, int]] = {}
        for path in _run_files(self.path):
            name = path.relative_to(self.path).as_posix()
            try:
                status = path.stat()
            except FileNotFoundError:  # replaced or removed meanwhile
                continue
            sizes[name] = (status.st_size, status.st_mtime_ns)
            if self._uploaded.get(name) != sizes[name]:
                changed[name] = path
        self._bucket.upload(changed)
        self._uploaded = sizes
        if _CONFIG not in sizes and self._bucket.exists(_CONFIG):  # the run failed without a checkpoint
            self._bucket.delete([_CONFIG])

    def wait(self) -> None:
        """Waits for the upload in flight.

        Raises:
          CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            set_aside = pending.result()
        except RunDirectoryError as error:
            raise CheckpointError(f"A checkpoint could not be uploaded. {error}") from error
        for step in set_aside:
            warnings.warn(
                f"Checkpoint {step} in {self.address} was set aside, because training resumed from an earlier "
                f"one: its manifest is now {_SET_ASIDE}. Delete it if it is no longer needed.",
                stacklevel=2,
            )

    def __enter__(self) -> "RemoteRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Uploads the remaining files. If the run has failed, a failing upload is only a warning."""
        try:
            try:
                self.wait()
            finally:
                self.upload_files()
        except StackError as failure:
            if error is None:
                raise
            warnings.warn(f"The last files of the run were not uploaded: {failure}", stacklevel=2)
        finally:
            self._thread.shutdown()

    def _upload_checkpoint(self, step: int, source: Path) -> list[int]:
        """Uploads a checkpoint; returns the later steps that were set aside, of an abandoned branch of training."""
        try:
            folder = f"{_CHECKPOINTS}/{source.name}"
            later = [other for other in _complete_steps(self._bucket) if other > step]
            for other in later:
                self._retire(other)
            self._delete(folder)
            files = {
                f"{folder}/{path.relative_to(source).as_posix()}": path for path in source.rglob("*") if path.is_file()
            }
            manifest = f"{folder}/{_MANIFEST}"
            self._bucket.upload({name: path for name, path in files.items() if name != manifest})
            self._bucket.upload({manifest: files[manifest]})
            self.upload_files()
            for old in _complete_steps(self._bucket)[: -self._keep]:
                self._delete(f"{_CHECKPOINTS}/{old:08d}")
            self._delete_partial()
            return later
        finally:
            shutil.rmtree(source.parent, ignore_errors=True)

    def _retire(self, step: int) -> None:
        folder = f"{_CHECKPOINTS}/{step:08d}"
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(self._bucket.read(f"{folder}/{_MANIFEST}"))
            self._bucket.upload({f"{folder}/{_SET_ASIDE}": Path(file.name)})
        self._bucket.delete([f"{folder}/{_MANIFEST}"])

    def _delete_partial(self) -> None:
        """Deletes partial checkpoints left by killed sessions, which lack a manifest and are not set aside."""
        for name in self._bucket.folders(_CHECKPOINTS):
            folder = f"{_CHECKPOINTS}/{name}"
            if not any(self._bucket.exists(f"{folder}/{manifest}") for manifest in (_MANIFEST, _SET_ASIDE)):
                self._delete(folder)

    def _delete(self, folder: str) -> None:
        names = self._bucket.names(folder)
        if (manifest := f"{folder}/{_MANIFEST}") in names:
            # First, because an interrupted deletion must not leave a complete checkpoint.
            self._bucket.delete([manifest])
            names.remove(manifest)
        self._bucket.delete(names)


def _run_files(directory: Path) -> Iterator[Path]:
    """Yields the files of a run other than its checkpoints, its lock and files that are being written."""
    for entry in sorted(directory.iterdir()):
        if entry.name in _NOT_UPLOADED or entry.name.startswith(".") or ".partial" in entry.name:
            continue
        yield from sorted(path for path in entry.rglob("*") if path.is_file()) if entry.is_dir() else [entry]


def _check_run(bucket: Bucket) -> None:
    if not bucket.exists(_CONFIG):
        raise RunDirectoryError(f"{bucket.address} holds no run: it has no {_CONFIG}. Correct the address.")


def _complete_steps(bucket: Bucket) -> Sequence[int]:
    folders = (name for name in bucket.folders(_CHECKPOINTS) if name.isdecimal())
    return sorted(int(name) for name in folders if bucket.exists(f"{_CHECKPOINTS}/{name}/{_MANIFEST}"))


def _download(bucket: Bucket, directory: Path, step: int | None) -> None:
    """Makes a directory a copy of a run with the checkpoint `step`; existing files of the checkpoint are reused.

    Without a step, the copy omits checkpoints.
    """
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=_made(directory.parent)) as partial:
        made = Path(partial) / directory.name
        bucket.download([name for name in bucket.names() if not name.startswith(f"{_CHECKPOINTS}/")], _made(made))
        if step is not None:
            folder = f"{_CHECKPOINTS}/{step:08d}"
            if _has_checkpoint(bucket, directory, step):
                shutil.copytree(directory / folder, made / folder, copy_function=os.link)
            else:
                bucket.download(bucket.names(folder), made)
        # A lock marks the files as a run's own: without a config they are leftovers of a failed start.
        (made / "run.lock").touch()
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)


def _has_checkpoint(bucket: Bucket, directory: Path, step: int) -> bool:
    """Returns whether a local copy has the same checkpoint as the storage."""
    manifest = f"{_CHECKPOINTS}/{step:08d}/{_MANIFEST}"
    copied = directory / manifest
    return copied.is_file() and copied.read_bytes() == bucket.read(manifest)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
