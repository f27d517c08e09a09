"""Texts of the user's source files for the page, with the changes since the capture."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

__all__ = ["sources"]

_LARGEST_BYTES: Final = 1 << 20
_ALL_BYTES: Final = 8 << 20


def sources(files: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Reads source files.

    Args:
      files: absolute path of each file by its short name.
      about: metadata of the capture: "sources" has the SHA-256 of files when they were captured. For other files the
        time of their last change is compared with "started_at".

    Returns:
      By short name "lines", or None for an unreadable or large file, and "note", a sentence about a missing or changed
      file, or "".
    """
    found: dict[str, dict[str, Any]] = {}
    left = _ALL_BYTES
    for name, file in files.items():
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            found[name] = {"lines": None, "note": f"The source cannot be read: {error.strerror or error}."}
            continue
        if len(data) > min(left, _LARGEST_BYTES):
            found[name] = {"lines": None, "note": f"The source, {len(data):,} bytes, is too large for the page."}
            continue
        left -= len(data)
        note = _change(file, data, about)
        found[name] = {"lines": data.decode(errors="replace").splitlines(), "note": note}
    return found


def _change(file: str, data: bytes, about: Mapping[str, Any]) -> str:
    """Returns a sentence if the file is not, or may not be, the file that was captured."""
    digests = about.get("sources")
    known = digests.get(file) if isinstance(digests, Mapping) else None
    if known is not None:
        changed = hashlib.sha256(data).hexdigest() != known
        return "This file changed since the capture: its lines may not be the lines that ran." if changed else ""
    try:
        started = datetime.fromisoformat(str(about["started_at"]))
        changed = datetime.fromtimestamp(Path(file).stat().st_mtime, UTC) > started
    except (KeyError, ValueError, TypeError, OSError):
        return "The capture does not record whether this file ran unchanged."
    return "This file was written after the capture: its lines may not be the lines that ran." if changed else ""
