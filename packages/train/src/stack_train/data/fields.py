"""Checked access to the text column of a table."""

from collections.abc import Iterable
from typing import Any

from stack_core.abi.errors import DataError, nearest

__all__ = ["check_field", "text_of"]


def check_field(name: str, fields: Iterable[str], text_field: str) -> None:
    """Raises a DataError if a table lacks the column `text_field`."""
    known = list(fields)
    if text_field not in known:
        raise DataError(
            f"{name}: there is no column {text_field!r}.{nearest(text_field, known)} Its columns: "
            f"{', '.join(map(repr, known)) or 'none'}. Set data.text_field to the one that holds the text."
        )


def text_of(name: str, value: Any, text_field: str) -> str:
    """Returns the value of the text column; raises a DataError unless it is a string."""
    if not isinstance(value, str):
        raise DataError(f"{name}: column {text_field!r} holds a {type(value).__name__}; a string was expected.")
    return value
