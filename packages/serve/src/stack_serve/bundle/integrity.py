"""Compares files with their digests, before anything parses them."""

import hashlib
import mmap
import re
from pathlib import Path

from stack_core.abi.errors import BundleDamaged, BundleError
from stack_serve.bundle.manifest import Manifest, parse_manifest

__all__ = [
    "MANIFEST",
    "MANIFEST_DIGEST",
    "checked",
    "digest",
    "digest_line",
    "digest_of",
    "mapped",
    "read_manifest",
    "verify",
]

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"

_COPY_BYTES = 2**24


def digest(content: bytes | memoryview) -> str:
    """Returns the digest in the format of manifests: "sha256:" and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def digest_of(path: Path) -> str:
    """Computes the digest of a file, reading it in parts."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest_line(content: bytes) -> bytes:
    """Returns the contents of `manifest.sha256`, in the format of `sha256sum -c`."""
    return f"{digest(content).removeprefix('sha256:')}  {MANIFEST}\n".encode()


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest of a bundle.

    Raises:
      BundleDamaged: the manifest does not match its digest.
      BundleError: the directory is not a bundle, or has an unsupported format.
    """
    if not (directory / MANIFEST).exists() and not (directory / MANIFEST_DIGEST).exists():
        what = "holds no bundle" if directory.is_dir() else "is not a directory"
        raise BundleError(f"{directory} {what}. `stack export` makes one.")
    content, line = _content(directory, MANIFEST), _content(directory, MANIFEST_DIGEST)
    # Two messages, because either file may be the damaged one.
    if not re.fullmatch(rb"[0-9a-f]{64}  manifest\.json\n", line):
        raise _damaged(directory, MANIFEST_DIGEST, "is not a line of `sha256sum`")
    if line != digest_line(content):
        raise _damaged(directory, MANIFEST, f"does not have the digest in {MANIFEST_DIGEST}")
    return parse_manifest(content)


def checked(directory: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a file.

    Raises:
      BundleDamaged: it does not have its digest, or is missing.
    """
    content = _content(directory, name)
    _compare(directory, manifest, name, memoryview(content))
    return content


def mapped(directory: Path, manifest: Manifest, name: str, *, sealed: bool) -> memoryview:
    """A large file in memory, at a page's beginning.

    Args:
      sealed: makes a private copy, which later changes of the file do not reach; otherwise the file is mapped, whose
        pages all processes share.

    Raises:
      BundleDamaged: it does not have its digest, or is missing.
    """
    try:
        with (directory / name).open("rb") as file:
            size_bytes = file.seek(0, 2)
            # mmap rejects empty files with a ValueError.
            if size_bytes == 0:
                raise _damaged(directory, name, "is empty")
            if sealed:
                # An anonymous mapping begins at a page, so XLA can use its arrays without a copy.
                memory = mmap.mmap(-1, size_bytes)
                file.seek(0)
                while part := file.read(_COPY_BYTES):
                    memory.write(part)
            else:
                memory = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _damaged(directory, name, f"cannot be read: {error.strerror}") from error
    view = memoryview(memory).toreadonly()
    _compare(directory, manifest, name, view)
    return view


def verify(directory: Path) -> Manifest:
    """Compares every file with its digest; nothing is compiled.

    Raises:
      BundleDamaged: a file does not have its digest, or is missing.
      BundleError: the directory is not a bundle, or has an unsupported format.
    """
    manifest = read_manifest(directory)
    for name in manifest.files:
        try:
            found = digest_of(directory / name)
        except OSError as error:
            raise _damaged(directory, name, f"cannot be read: {error.strerror}") from error
        if found != manifest.files[name]:
            raise _damaged(directory, name, "does not have its digest")
    return manifest


def _content(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise _damaged(directory, name, f"cannot be read: {error.strerror}") from error


def _compare(directory: Path, manifest: Manifest, name: str, content: memoryview) -> None:
    if digest(content) != manifest.files[name]:
        raise _damaged(directory, name, "does not have its digest")


def _damaged(directory: Path, name: str, damage: str) -> BundleDamaged:
    return BundleDamaged(f"{directory / name} {damage}: the bundle is damaged. Copy or export it again.")
