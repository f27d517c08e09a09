"""The files of a prepared set, and the manifest of their counts and digests.

DIR/
├── manifest.json       written last: a set without it is incomplete
├── plan.json           source, tokenizer and settings, which resuming must not change
├── tokenizer/
├── offsets.npy         start of each document among the tokens of all shards, and their number
├── digests.npy         digest of each document's text
├── names.bin, name_offsets.npy
└── shards/
    └── PART-SHARD.tokens
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import DataError
from stack_train.data.corpus import Corpus
from stack_train.data.files import unreadable
from stack_train.data.prepared.tokens import ShardedTokens

__all__ = ["FORMAT", "INDEX_FILES", "Manifest", "Shard", "open_corpus", "read_manifest", "sha256_of", "verify"]

FORMAT = 1
INDEX_FILES = ("offsets.npy", "digests.npy", "name_offsets.npy", "names.bin")
_MANIFEST = "manifest.json"
_BYTES_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class Shard:
    """A file of tokens.

    Attributes:
      file: path within the set.
      documents: number of documents.
      tokens: number of tokens.
      sha256: digest of the file.
    """

    file: str
    documents: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared set.

    Attributes:
      format: version of the layout.
      source: address of the documents, for people.
      tokenizer: digest of the tokenizer.
      dtype: dtype of the tokens.
      documents, tokens: numbers in all shards.
      content_digest: digest of the tokenizer, and of every document's length and text.
      shards: files of tokens in order.
      index: digests of the other files by name.
    """

    format: int
    source: str
    tokenizer: str
    dtype: str
    documents: int
    tokens: int
    content_digest: str
    shards: tuple[Shard, ...]
    index: Mapping[str, str]

    def write(self, directory: Path) -> None:
        """Writes the manifest atomically."""
        partial = directory / f"{_MANIFEST}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")
        partial.replace(directory / _MANIFEST)


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a complete set.

    Raises:
      DataError: the directory holds no complete set, or the set has another format.
    """
    try:
        fields: Any = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (directory / "plan.json").is_file():
            raise DataError(
                f"The prepared set in {str(directory)!r} is incomplete. Run the command that began it again: "
                "stack data prepare continues after the last complete shard."
            ) from None
        raise DataError(
            f"{str(directory)!r} holds no prepared set. Give the --output of a `stack data prepare`."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {str(directory / _MANIFEST)!r}: {error}. Restore the file.") from error
    if fields.get("format") != FORMAT:
        raise DataError(
            f"The prepared set in {str(directory)!r} has format {fields.get('format')!r}; this version reads {FORMAT}. "
            "Prepare it again."
        )
    shards: Any = tuple(Shard(**shard) for shard in fields.pop("shards"))
    return Manifest(shards=shards, **fields)


def open_corpus(directory: Path) -> Corpus:
    """Maps a prepared set into memory.

    Raises:
      DataError: the set is incomplete, or the size of a file differs from the manifest.
    """
    manifest = read_manifest(directory)
    dtype = np.dtype(manifest.dtype)
    shards: list[np.ndarray] = []
    for shard in manifest.shards:
        path = directory / shard.file
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise _damaged(path, "it is missing") from error
        if size_bytes != shard.tokens * dtype.itemsize:
            raise _damaged(path, f"it has {size_bytes} bytes, and the manifest {shard.tokens * dtype.itemsize}")
        if shard.tokens:
            shards.append(np.memmap(path, dtype, "r"))
    try:
        arrays = {name: np.load(directory / f"{name}.npy", "r") for name in ("offsets", "digests", "name_offsets")}
        names = np.memmap(directory / "names.bin", np.uint8, "r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"The index of the prepared set in {str(directory)!r} cannot be read: {error}. Restore its files, or "
            "prepare it again in another directory."
        ) from error
    if len(arrays["offsets"]) != manifest.documents + 1 or int(arrays["offsets"][-1]) != manifest.tokens:
        raise _damaged(directory / "offsets.npy", "its counts differ from the manifest")
    return Corpus(
        tokens=shards[0] if len(shards) == 1 else ShardedTokens(shards),
        content_digest=manifest.content_digest,
        _names=names,
        _name_offsets=arrays["name_offsets"],
        offsets=arrays["offsets"],
        digests=arrays["digests"],
    )


def verify(directory: Path) -> Iterator[tuple[str, bool]]:
    """Yields the name of each file of a set, and whether it has its digest.

    Raises:
      DataError: the set is incomplete, or a file cannot be read.
    """
    manifest = read_manifest(directory)
    digests = {shard.file: shard.sha256 for shard in manifest.shards} | dict(manifest.index)
    for name, digest in digests.items():
        yield name, sha256_of(directory / name) == digest


def sha256_of(path: Path) -> str:
    """Returns the hexadecimal SHA-256 digest of a file.

    Raises:
      DataError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BYTES_AT_ONCE):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{str(path)!r} of a prepared set is damaged: {reason}. Restore the file, or prepare the set again in another "
        "directory."
    )
