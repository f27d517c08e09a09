"""Results of tools as contents of messages: texts, and images of Pillow as content parts.

Processes of tools import this module, so it needs the standard library only.
"""

import base64
import io
from typing import Any, TypeAlias

__all__ = ["ToolResult", "as_content", "encode_png", "image_part", "is_pillow_image"]

ToolResult: TypeAlias = str | list[dict[str, Any]]
"""Content of a message: a text, or a list of OpenAI's content parts."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def as_content(result: Any) -> ToolResult:
    """Returns the content of a message with a result: an image of Pillow as a part, anything else as text."""
    return [image_part(encode_png(result))] if is_pillow_image(result) else str(result)


def is_pillow_image(value: Any) -> bool:
    """Recognizes images of Pillow by their methods, because the extra may not be installed."""
    return all(hasattr(value, name) for name in ("mode", "convert", "save"))


def encode_png(picture: Any) -> bytes:
    """Encodes an image of Pillow as a PNG file."""
    file = io.BytesIO()
    (picture if picture.mode in _PNG_MODES else picture.convert("RGB")).save(file, format="PNG")
    return file.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    """Returns the content part of an image file; readers ignore the media type and detect the format."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
