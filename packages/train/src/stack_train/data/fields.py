"""Checked access to the text column of a table."""

from collections.abc import Iterable
from typing import Any

from stack_core.abi.errors import DataError, nearest

__all__ = ["check_field", "text_of"]


def check_field(
    name: str, fields: Iterable[str], field: str, *, setting: str = "text_field", noun: str = "the text"
) -> None:
    """Raises a DataError if a table lacks a column.

    Args:
      name: name of the table.
      fields: names of its columns.
      field: name of the column.
      setting: key of the section `data` that names the column, for messages.
      noun: content of the column, for messages.
    """
    known = list(fields)
    if field not in known:
        raise DataError(
            f"{name}: there is no column {field!r}.{nearest(field, known)} Its columns: "
            f"{', '.join(map(repr, known)) or 'none'}. Set data.{setting} to the one that holds {noun}."
        )


def text_of(name: str, value: Any, text_field: str) -> str:
    """Returns the value of the text column; raises a DataError unless it is a string."""
    if not isinstance(value, str):
        raise DataError(f"{name}: column {text_field!r} holds a {type(value).__name__}; a string was expected.")
    return value
