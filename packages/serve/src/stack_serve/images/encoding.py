"""Encoding of pixels as image files."""

import base64
import io
from typing import Any

import numpy as np

from stack_core.abi.errors import ConfigError
from stack_core.abi.installing import install_command
from stack_serve.images.schemas import OutputFormat

__all__ = ["encode_base64", "pillow"]


def pillow() -> Any:
    """Imports and returns `PIL.Image`.

    Raises:
      ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image  # an extra
    except ImportError as error:
        message = f"Images are encoded by Pillow: {error}. Install it: {install_command('stack-serve[images]')}"
        raise ConfigError(message) from error
    return Image


def encode_base64(pixels: np.ndarray, output_format: OutputFormat, quality: int | None) -> str:
    """Encodes uint8[height, width, channels] as an image file in base64.

    Args:
      quality: quality of jpeg and webp, 0 to 100; None is Pillow's default.
    """
    file = io.BytesIO()
    image = pillow().fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if output_format == "jpeg" and image.mode == "RGBA":
        image = image.convert("RGB")
    image.save(file, format=output_format, **({} if quality is None else {"quality": quality}))
    return base64.b64encode(file.getvalue()).decode()
