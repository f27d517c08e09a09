"""Tasks in files: JSON objects, one a line."""

import glob
from pathlib import Path
from typing import Any

from stack_core.errors import DataError
from stack_core.text.json_records import parse_record

__all__ = ["Record", "read_records"]

Record = tuple[str, dict[str, Any]]
"""Where a record stands, "path:line", and its fields."""


def read_records(pattern: str, key: str) -> list[Record]:
    """Reads the records of all files that a glob matches, in the order of their paths and lines.

    Args:
      key: of the config that holds the pattern, for messages.

    Raises:
      DataError: nothing matches, or a line is no JSON object with a prompt; names it.
    """
    paths = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))  # noqa: PTH207  # takes absolute ones
    if not paths:
        raise DataError(f"{key} is {pattern!r}, which matches no file; relative paths start at {str(Path.cwd())!r}.")
    return [record for path in paths for record in _records(Path(path))]


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
