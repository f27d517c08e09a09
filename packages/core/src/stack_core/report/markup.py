"""HTML and SVG elements whose texts and attributes are escaped on entry: a name can never become markup."""

import html
import re
from typing import Final

__all__ = ["Markup", "breakable", "element", "text"]

# Characters that HTML forbids even when escaped, and characters that UTF-8 cannot encode.
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID: Final = frozenset({"meta", "wbr"})


class Markup(str):
    """Text that is already markup; any other text is escaped."""

    __slots__ = ()


def text(value: str) -> Markup:
    """Escapes a text; returns `Markup` unchanged."""
    return value if isinstance(value, Markup) else Markup(html.escape(_FORBIDDEN.sub("\ufffd", value)))


def breakable(value: str) -> Markup:
    """Escapes a path or layer name, with line breaks allowed only after slashes."""
    return Markup(text(value).replace("/", "/<wbr>"))


def element(name: str, /, *children: str | None, **attributes: str | int | float | None) -> Markup:
    """Builds an element with its children; children and attributes that are None are omitted.

    Args:
      attributes: `class_` is the attribute class, `stroke_width` stroke-width; numbers have at most two decimals.
    """
    inside = "".join(text(child) for child in children if child is not None)
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{inside}</{name}>")


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return text(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
