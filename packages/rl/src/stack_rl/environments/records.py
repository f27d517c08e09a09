"""Tasks in files: JSON objects, one a line."""

import glob
import json
from pathlib import Path
from typing import Any

from stack_core.errors import DataError

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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold other ends of lines within its strings
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{name} is not JSON: {error}. Each line holds one object.") from error
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), (str, list)):
            raise DataError(f"{name} has no 'prompt', a text or a list of messages.")
        found.append((name, record))
    return found
