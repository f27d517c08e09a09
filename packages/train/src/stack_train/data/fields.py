"""The text of a record of a table, and what to do about records without."""

from collections.abc import Iterable
from typing import Any

from stack_core.abi.errors import DataError, nearest

__all__ = ["check_field", "text_of"]


def check_field(name: str, fields: Iterable[str], text_field: str) -> None:
    """Raises a DataError where a table has no such column."""
    known = list(fields)
    if text_field not in known:
        raise DataError(
            f"{name}: there is no column {text_field!r}.{nearest(text_field, known)} Its columns: "
            f"{', '.join(map(repr, known)) or 'none'}. Set data.text_field to the one that holds the text."
        )


def text_of(name: str, value: Any, text_field: str) -> str:
    """Returns a text; raises a DataError where it is none."""
    if not isinstance(value, str):
        raise DataError(f"{name}: column {text_field!r} holds a {type(value).__name__}; a string was expected.")
    return value
