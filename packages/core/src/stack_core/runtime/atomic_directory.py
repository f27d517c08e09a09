"""Atomic creation of directories."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from stack_core.abi.errors import ConversionError

__all__ = ["atomic_directory"]


@contextlib.contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `destination` on success and removed on failure.

    Raises:
      ConversionError: the destination exists, or the disk is full or not writable.
    """
    if destination.exists():
        raise ConversionError(f"{destination} exists already; it is not overwritten. Choose a new directory.")
    partial = destination.with_name(f"{destination.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(destination)
    except OSError as error:
        raise ConversionError(f"{destination} could not be written: {error}. Partial files were removed.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
