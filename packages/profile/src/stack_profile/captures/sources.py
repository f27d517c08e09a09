"""Digests of the program's own source files, for noticing changes after the capture."""

import functools
import hashlib
import sys
from pathlib import Path

from stack_profile.traces.instructions import Frame

__all__ = ["source_digests"]


def source_digests() -> dict[str, str]:
    """Returns the SHA-256 of every imported source file outside of installed packages, by absolute path."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())} | {sys.argv[0]}
    sources = [file for file in files if isinstance(file, str) and file.endswith(".py")]
    paths = [str(Path(file).absolute()) for file in sorted(sources)]
    found = {path: _digest(path) for path in paths if not Frame(path, 0, "").package}
    return {path: digest for path, digest in found.items() if digest}


@functools.cache  # later captures of a process keep the digest of the file as it was closer to its import
def _digest(path: str) -> str:
    """Returns the SHA-256 of a file, or "" if it was deleted or is in an archive."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
