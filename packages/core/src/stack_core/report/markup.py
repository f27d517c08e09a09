"""HTML and SVG made of elements: texts and attributes are escaped where they enter, so that no name becomes markup."""

import html
import re
from typing import Final

__all__ = ["Markup", "breakable", "element", "text"]

# What HTML does not allow even escaped, and what UTF-8 does not have.
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID: Final = frozenset({"meta", "wbr"})


class Markup(str):
    """Text that is markup already; every other text is escaped."""

    __slots__ = ()


def text(value: str) -> Markup:
    """What shows `value`, whatever is in it."""
    return value if isinstance(value, Markup) else Markup(html.escape(_FORBIDDEN.sub("\ufffd", value)))


def breakable(value: str) -> Markup:
    """A path or the name of a layer, which goes on in the next line after a slash rather than anywhere."""
    return Markup(text(value).replace("/", "/<wbr>"))


def element(name: str, /, *children: str | None, **attributes: str | int | float | None) -> Markup:
    """An element with its children; those that are None are left out, as are attributes.

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
