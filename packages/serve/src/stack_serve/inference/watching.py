"""What lies in a repository: MODEL/VERSION/ is a bundle, and so may MODEL/ be, which then is version 1."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from stack_core.abi.errors import ConfigError
from stack_serve.bundle.integrity import MANIFEST_DIGEST
from stack_serve.inference.repository import Key

__all__ = ["directory_of", "scan"]


def scan(repository: Path) -> Mapping[Key, str]:
    """Finds the versions in a repository, each with a fingerprint that changes with any of its files.

    Raises:
      ConfigError: the path is not a directory.
    """
    if not repository.is_dir():
        raise ConfigError(f"{repository} is not a directory. Name one that holds MODEL/VERSION/ bundles.")
    return {key: _fingerprint(directory) for key, directory in _bundles(repository)}


def directory_of(repository: Path, key: Key) -> Path:
    """Returns the directory of a version's bundle."""
    directory = repository / key.model
    return directory if (directory / MANIFEST_DIGEST).exists() else directory / str(key.version)


def _bundles(repository: Path) -> Iterator[tuple[Key, Path]]:
    for model in repository.iterdir():
        if (model / MANIFEST_DIGEST).exists():
            yield Key(model.name, 1), model
        elif model.is_dir():
            for directory in model.iterdir():
                is_number = directory.name.isascii() and directory.name.isdigit() and directory.name[0] != "0"
                if is_number and (directory / MANIFEST_DIGEST).exists():
                    yield Key(model.name, int(directory.name)), directory


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # It went while we looked; the next scan sees it gone.
            continue
        file = f"{path.relative_to(directory)}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(file.encode("utf-8", "surrogateescape"))  # Linux's names need not be UTF-8.
    return digest.hexdigest()
