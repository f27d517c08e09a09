"""Tasks in files: JSON objects, one a line."""

import glob
import hashlib
from pathlib import Path
from typing import Any

from stack_core.abi.errors import DataError
from stack_core.text.json_records import parse_record

__all__ = ["Record", "files_digest", "read_records"]

Record = tuple[str, dict[str, Any]]
"""Where a record stands, "path:line", and its fields."""


def read_records(pattern: str, key: str) -> list[Record]:
    """Reads the records of all files that a glob matches, in the order of their paths and lines.

    Args:
      key: of the config that holds the pattern, for messages.

    Raises:
      DataError: nothing matches, or a line is no JSON object with a prompt; names it.
    """
    paths = _matching(pattern)
    if not paths:
        raise DataError(f"{key} is {pattern!r}, which matches no file; relative paths start at {str(Path.cwd())!r}.")
    return [record for path in paths for record in _records(path)]


def files_digest(pattern: str) -> str:
    """Returns a digest of the names and contents of all files that a glob matches."""
    found = hashlib.sha256()
    for path in filter(Path.is_file, _matching(pattern)):
        found.update(f"{path}:{path.stat().st_size}:".encode() + path.read_bytes())
    return found.hexdigest()


def _matching(pattern: str) -> list[Path]:
    """Returns the files that a glob matches, sorted; absolute patterns are allowed."""
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207  # takes absolute ones
    return [Path(path) for path in sorted(found)]


def _records(path: Path) -> list[Record]:
    found = []
    try:
        lines = path.read_bytes().split(b"\n")  # JSON may hold other ends of lines within its strings
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
