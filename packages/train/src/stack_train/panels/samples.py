"""The panel `samples`: images and videos that `stack sample` wrote to the run directory."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from stack_core.abi.reports import Fragment
from stack_core.report.markup import Markup, element

__all__ = ["samples"]

_MOST: Final = 6
# Width and height in a file's header: their bytes, and the byte order.
_SIZES: Final[dict[str, tuple[slice, Literal["big", "little"]]]] = {
    ".png": (slice(16, 24), "big"),
    ".gif": (slice(6, 10), "little"),
}


def samples(directory: Path, config: Mapping[str, Any]) -> Fragment | None:
    """Shows the latest images and animations, newest first; returns None without any."""
    files = [path for path in (directory / "samples").glob("*") if path.suffix in _SIZES]
    paths = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    if not paths:
        return None
    return Fragment("samples", element("div", *map(_figure, paths[:_MOST]), class_="small plots"))


def _figure(path: Path) -> Markup:
    content = path.read_bytes()
    place, order = _SIZES[path.suffix]
    size, half = content[place], (place.stop - place.start) // 2
    width, height = (int.from_bytes(part, order) for part in (size[:half], size[half:]))
    source = f"data:image/{path.suffix[1:]};base64,{base64.b64encode(content).decode()}"
    image = element("image", href=source, width=width, height=height)
    drawing = element("svg", image, viewBox=f"0 0 {width} {height}", role="img", aria_label=f"samples: {path.stem}")
    return element("figure", element("figcaption", path.stem), drawing)
