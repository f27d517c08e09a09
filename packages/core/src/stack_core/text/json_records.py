"""Parsing of JSONL lines to records."""

import json
from typing import Any

from stack_core.abi.errors import DataError

__all__ = ["parse_record"]


def parse_record(name: str, line: bytes) -> dict[str, Any]:
    """Parses one line of a JSONL file, which must contain one complete JSON object.

    Args:
      name: location of the line for messages, "path:line".

    Raises:
      DataError: the line is not UTF-8, not JSON, nested too deeply, or not an object; or one of its strings is not
        valid Unicode because it contains half of a surrogate pair.
    """
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name!r} is not UTF-8 text: byte {error.start} is 0x{line[error.start : error.start + 1].hex()} "
            f"({error.reason}). Convert the file to UTF-8, or omit it."
        ) from error
    except ValueError as error:
        raise DataError(f"{name}: the line is not JSON: {error}. Each line must be a JSON object.") from error
    except RecursionError:
        raise DataError(
            f"{name}: the line's lists and objects are nested too deeply. Flatten the record, or remove it."
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{name}: the line holds a {type(record).__name__}; an object was expected.")
    if b"\\u" in line:  # in UTF-8 text only an escape can contain half of a pair
        _check_characters(name, record)
    return record


def _check_characters(name: str, record: dict[str, Any]) -> None:
    """Raises a DataError if a string of a record contains half of a surrogate pair, which cannot be encoded."""
    pending: list[tuple[str, Any]] = [("", record)]  # a stack, because nesting may exceed Python's recursion limit
    while pending:
        field, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{field}.{key}".lstrip("."), each) for key, each in value.items()]
            pending += [(field or "a key", key) for key in value]
        elif isinstance(value, list):
            pending += [(f"{field}.{place}", each) for place, each in enumerate(value)]
        elif isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{name}: field {field!r} has half a surrogate pair at {error.start}, which is not a character. "
                    "Remove it, or write the complete character."
                ) from None
