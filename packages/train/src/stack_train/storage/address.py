"""Addresses of runs, in object storage or in directories."""

import re
from typing import Annotated

from pydantic import AfterValidator

from stack_core.abi.config import MayBeRemote
from stack_core.abi.local_paths import PathError, local_address, local_path

__all__ = ["StorageAddress", "StoragePath", "is_storage"]

_OBJECTS = re.compile(r"(s3|gs)://")


def is_storage(address: str) -> bool:
    """Returns whether an address is of object storage that runs support: "s3://BUCKET/..." or "gs://BUCKET/..."."""
    return _OBJECTS.match(address) is not None


def storage_path(path: str) -> str:
    """Returns an address of object storage without a trailing "/", and applies `local_path` to any other path.

    Raises:
      ConfigError: the address lacks a folder within its bucket or has `..`, or its scheme is not supported.
    """
    if not is_storage(path):
        return str(local_path(path))
    bucket, _, folder = path.partition("://")[2].rstrip("/").partition("/")
    if not bucket or not folder or ".." in folder.split("/"):
        raise PathError(
            f"{path!r} is not a folder in object storage; expected 's3://BUCKET/FOLDER' or 'gs://BUCKET/FOLDER'."
        )
    return path.rstrip("/")


def storage_address(address: str) -> str:
    """Applies `storage_path` to an address of object storage, and `local_address` to any other address."""
    return storage_path(address) if is_storage(address) else local_address(address)


StoragePath = Annotated[str, MayBeRemote(), AfterValidator(storage_path)]
"""The path of a directory, "s3://BUCKET/FOLDER" or "gs://BUCKET/FOLDER"."""

StorageAddress = Annotated[str, MayBeRemote(), AfterValidator(storage_address)]
"""The address of a run, in object storage or not, or "FORMAT:DIR"."""
