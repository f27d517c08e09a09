"""The document around a report: one file that loads nothing, and whose policy lets nothing be loaded."""

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, element

__all__ = ["document", "facts"]


def document(name: str, *body: Markup | None, script: str = "") -> str:
    """A page with the style sheet of all reports; its policy forbids other styles, scripts and every load.

    Images are allowed that the page itself holds, as `data:` addresses.

    Args:
      name: the title of the window.
      script: the only one that runs; the page can be read without.
    """
    style = resources.files("stack_core.report").joinpath("style.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}" + (
        f"; script-src {_hash(script)}" if script else ""
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", name),
        element("style", Markup(style)),
    )
    shown = element("body", *body, element("script", Markup(script)) if script else None)
    return f"<!doctype html>\n{element('html', head, shown, lang='en')}\n"


def facts(values: Mapping[str, Any]) -> Markup:
    """Numbers and texts in small boxes, each below the name of its field."""
    pairs = (
        element("div", element("dt", title(name)), element("dd", number(name, value))) for name, value in values.items()
    )
    return element("dl", *pairs)


def _hash(content: str) -> str:
    """How a policy names the one inline style or script that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
