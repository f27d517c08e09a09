"""Task files in JSONL format: one JSON object per line."""

import glob
import hashlib
from pathlib import Path
from typing import Any

from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record

__all__ = ["Record", "files_digest", "read_records"]

Record = tuple[str, dict[str, Any]]
"""Location of a record, "path:line", and its fields."""


def read_records(pattern: str, key: str) -> list[Record]:
    """Reads the records of all files that match a glob, ordered by path and line.

    Args:
      pattern: glob pattern; relative patterns start at the working directory.
      key: config key of the pattern, for messages.

    Raises:
      DataError: no file matches, or a line is not a JSON object with a prompt; the message names the line.
    """
    paths = _matching(pattern)
    if not paths:
        raise DataError(f"{key} is {pattern!r}, which matches no file; relative paths start at {str(Path.cwd())!r}.")
    return [record for path in paths for record in _records(path)]


def files_digest(pattern: str) -> str:
    """Returns a digest of the names and contents of all files that match a glob."""
    found = hashlib.sha256()
    for path in filter(Path.is_file, _matching(pattern)):
        found.update(f"{path}:{path.stat().st_size}:".encode() + path.read_bytes())
    return found.hexdigest()


def _matching(pattern: str) -> list[Path]:
    """Returns the sorted paths that match a glob; absolute patterns are allowed."""
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207  # Path.glob refuses absolute patterns
    return [Path(path) for path in sorted(found)]


def _records(path: Path) -> list[Record]:
    found = []
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: JSON strings may contain other line separators
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"{path}:{number}"
        record = parse_record(name, line)
        if not isinstance(record.get("prompt"), (str, list)):
            raise DataError(f"{name} has no 'prompt', a text or a list of messages.")
        found.append((name, record))
    return found
