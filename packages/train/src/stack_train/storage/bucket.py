"""Files under one address of object storage, through fsspec."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.errors import RunDirectoryError
from stack_core.abi.installing import install_command

__all__ = ["Bucket"]

_EXTRAS = {"s3": "s3", "gs": "gcs"}


class Bucket:
    """The objects below an address such as "s3://bucket/run". Names are relative to it, with "/" between folders.

    Credentials, region and endpoint come from the environment, as for the provider's own tools (`AWS_PROFILE`,
    `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`).

    Args:
      address: "s3://BUCKET/PREFIX" or "gs://BUCKET/PREFIX".

    Raises:
      RunDirectoryError: the package of the scheme is not installed. Every method raises it if the storage refuses.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        scheme, _, self._root = address.partition("://")
        try:
            import fsspec

            # Listings are not cached, since other machines write, too.
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise RunDirectoryError(
                f"{address!r} is read and written by a package that is missing: {error}. "
                f"Install it: {install_command(f'stack-train[{_EXTRAS[scheme]}]')}"
            ) from error

    def check_writable(self) -> None:
        """Writes and deletes an object; a read-only bucket then ends a run before training."""
        name = f".stack-write-check-{os.getpid()}"
        with self._naming("cannot be written"):
            self._files.pipe_file(self._path(name), b"stack")
            self._files.rm_file(self._path(name))

    def exists(self, name: str) -> bool:
        with self._naming("cannot be read"):
            return bool(self._files.exists(self._path(name)))

    def read(self, name: str) -> bytes:
        with self._naming(f"cannot be read ({name})"):
            return bytes(self._files.cat_file(self._path(name)))

    def names(self, folder: str = "") -> list[str]:
        """Returns the names of all objects in a folder and below, sorted."""
        with self._naming("cannot be listed"):
            found = self._files.find(self._path(folder))
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders directly within a folder, without their own path."""
        with self._naming("cannot be listed"):
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")

    def upload(self, files: Mapping[str, Path]) -> None:
        """Uploads local files, several at a time.

        Args:
          files: path of each file by the name of its object.
        """
        if files:
            with self._naming("cannot be written"):
                self._files.put([str(path) for path in files.values()], [self._path(name) for name in files])

    def download(self, names: Sequence[str], directory: Path) -> None:
        """Downloads objects to their names below a local directory, several at a time."""
        paths = [directory / name for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        if names:
            with self._naming("cannot be read"):
                self._files.get([self._path(name) for name in names], [str(path) for path in paths])

    def delete(self, names: Sequence[str]) -> None:
        if names:
            with self._naming("cannot be written"):
                self._files.rm([self._path(name) for name in names])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _naming(self, failure: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Each provider's library raises different exceptions.
            raise RunDirectoryError(
                f"{self.address!r} {failure}: {type(error).__name__}: {error}. Check that the bucket exists, and that "
                "the credentials in the environment may read, write and delete there."
            ) from error
