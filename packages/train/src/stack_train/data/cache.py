"""An on-disk cache of expensive results with atomic entries.

An entry is built in a temporary folder and then renamed, so a killed process leaves no partial entry. If two processes
build the same entry, the first rename wins and the second result is discarded.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack_core.abi.errors import DataError

__all__ = ["cached", "complete_entries", "digest_of"]

_MANIFEST = "manifest.json"
_ABANDONED_S = 24 * 3600


def digest_of(*parts: Any) -> str:
    """Returns the hexadecimal SHA-256 digest of JSON-compatible values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cached(entry: Path, build: Callable[[Path], None]) -> Path:
    """Returns the folder `entry`, after building it with `build(folder)` if it is missing or damaged.

    Raises:
      DataError: the cache cannot be written.
    """
    if _is_complete(entry):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(entry)
        folder = Path(tempfile.mkdtemp(prefix=f".{entry.name[:16]}-", dir=entry.parent))
        try:
            build(folder)
            _write_manifest(folder)
            _publish(folder, entry)
        finally:
            # After a successful rename there is nothing to remove.
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"Cannot write the data cache under {str(entry.parent)!r}: {error.strerror or error}. "
            "Free space there, or set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return entry


def complete_entries(folder: Path) -> list[Path]:
    """Lists the undamaged entries in a folder by name; returns an empty list if the folder does not exist."""
    return [entry for entry in sorted(folder.glob("[!.]*")) if _is_complete(entry)]


def _remove_abandoned(entry: Path) -> None:
    """Deletes folders that killed processes left for this entry.

    A folder is abandoned if it has not been written to for a day.
    """
    for folder in entry.parent.glob(f".{entry.name[:16]}-*"):
        with contextlib.suppress(OSError):
            touched_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - touched_s > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Path) -> None:
    if entry.exists() and not _is_complete(entry):
        damaged = folder.with_name(f"{folder.name}-damaged")
        with contextlib.suppress(FileNotFoundError):  # Another process may have moved it first.
            entry.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        # Fails if another process has published the entry, whose result is then used.
        folder.rename(entry)
    except OSError:
        if not _is_complete(entry):
            raise


def _write_manifest(folder: Path) -> None:
    sizes_bytes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes_bytes), encoding="utf-8")


def _is_complete(entry: Path) -> bool:
    """Checks that every file has its original size: a crash of the machine can lose the contents of renamed files."""
    try:
        sizes_bytes = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all((entry / name).stat().st_size == size for name, size in sizes_bytes.items())
    except (OSError, ValueError):
        return False
