"""The HTML document of a report: a single file whose content security policy forbids all loads."""

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from stack_core.report.fields import number, title
from stack_core.report.markup import Markup, element

__all__ = ["continuation", "document", "framed", "key_values"]


def document(name: str, *body: Markup | None, script: str = "", style: str = "") -> str:
    """Builds a page with the common style sheet; its policy forbids other styles and scripts, and loading anything.

    Images are allowed only as `data:` URLs within the page.

    Args:
      name: window title.
      script: the only allowed script; the page must be readable without JavaScript.
      style: rules after the common style sheet.
    """
    style = resources.files("stack_core.report").joinpath("style.css").read_text(encoding="utf-8") + style
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


def framed(page: str, title: str, *, height_px: int = 900) -> str:
    """Returns a page as a frame for a notebook. The page's own policy holds in it: it loads nothing."""
    style = f"width: 100%; height: {height_px}px; border: 0"
    return str(element("iframe", srcdoc=page, sandbox="allow-scripts", style=style, title=title))


def key_values(values: Mapping[str, Any]) -> Markup:
    """Builds a list of values in small boxes, each with the title of its field."""
    pairs = (
        element("div", element("dt", title(name)), element("dd", number(name, value))) for name, value in values.items()
    )
    return element("dl", *pairs)


def continuation(prompt: str, generated: str, note: str) -> Markup:
    """Shows a generated text for a notebook, after its prompt in grey."""
    before = element("span", prompt, style="opacity: 0.6")
    return element("div", element("pre", before, generated, style="white-space: pre-wrap"), element("small", note))


def _hash(content: str) -> str:
    """Returns the policy's hash source for an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
