"""The panel `samples`: images that `stack sample` wrote to the run directory."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stack_core.abi.reports import Fragment
from stack_core.report.markup import Markup, element

__all__ = ["samples"]

_MOST: Final = 6
_PNG_SIZE: Final = slice(16, 24)  # width and height, big-endian, in the PNG header


def samples(directory: Path, config: Mapping[str, Any]) -> Fragment | None:
    """Shows the latest images, newest first; returns None without images."""
    paths = sorted((directory / "samples").glob("*.png"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not paths:
        return None
    return Fragment("samples", element("div", *map(_figure, paths[:_MOST]), class_="small plots"))


def _figure(path: Path) -> Markup:
    content = path.read_bytes()
    size = content[_PNG_SIZE]
    width, height = int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = element("image", href=source, width=width, height=height)
    drawing = element("svg", image, viewBox=f"0 0 {width} {height}", role="img", aria_label=f"samples: {path.stem}")
    return element("figure", element("figcaption", path.stem), drawing)
