"""Image grids, PNG files, animations and the orientation of image files."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command

__all__ = ["VIDEO_SUFFIXES", "pillow", "tiled", "turn_upright", "upright_size", "write_png", "write_video"]

VIDEO_SUFFIXES = (".gif", ".webp", ".png")
"""Suffixes of videos that `write_video` writes."""

_ORIENTATION = 274  # tag of EXIF
_ON_THEIR_SIDE = (5, 6, 7, 8)  # orientations that swap height and width
# Pillow's transpositions by EXIF orientation. `ImageOps.exif_transpose` also rewrites all tags, and fails if
# they are malformed.
_TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def tiled(
    images: UInt8[np.ndarray, "images height width channels"], columns: int, *, min_pixels: int = 64
) -> UInt8[np.ndarray, "grid_height grid_width channels"]:
    """Arranges images in a grid with white lines of one pixel; enlarges small images by integer factors.

    Args:
      min_pixels: minimum size of the shorter side of an enlarged image.
    """
    factor = max(1, -(-min_pixels // min(images.shape[1:3])))
    large = images.repeat(factor, axis=1).repeat(factor, axis=2)
    framed = np.pad(large, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    count, height, width, channels = framed.shape
    rows = framed.reshape(count // columns, columns, height, width, channels)
    return rows.transpose(0, 2, 1, 3, 4).reshape(-1, columns * width, channels)[:-1, :-1]


def write_png(pixels: UInt8[np.ndarray, "height width channels"], path: Path) -> None:
    """Writes an image with 1 (grey), 3 or 4 channels; creates missing folders.

    Raises:
      DataError: Pillow is not installed, the number of channels is invalid, or the file cannot be written.
    """
    if pixels.shape[-1] not in (1, 3, 4):
        raise DataError(f"An image has 1, 3 or 4 channels, not {pixels.shape[-1]}; latents need their decoder.")
    image = pillow().fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, format="PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error


def write_video(frames: UInt8[np.ndarray, "frames height width channels"], path: Path, *, rate: float) -> None:
    """Writes an endless animation, or for the suffix .png a numbered file per frame; see `VIDEO_SUFFIXES`.

    GIF has 256 colours per frame, and WebP is lossless. In both, Pillow joins consecutive equal frames.

    Args:
      rate: frames per second.

    Raises:
      DataError: Pillow is not installed, the suffix is another one, the number of channels is invalid, or the file
        cannot be written.
    """
    if path.suffix not in VIDEO_SUFFIXES:
        raise DataError(f"{path} is no {', '.join(VIDEO_SUFFIXES)} file, as which videos are written. Rename it.")
    if path.suffix == ".png":
        for number, frame in enumerate(frames):
            write_png(frame, path.with_stem(f"{path.stem}-{number:04}"))
        return
    if frames.shape[-1] not in (1, 3):
        raise DataError(f"A video has 1 or 3 channels, not {frames.shape[-1]}; latents need their decoder.")
    images = [pillow().fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame) for frame in frames]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000.0 / rate), loop=0, **options)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error


def pillow() -> Any:
    """Imports and returns `PIL.Image`.

    Raises:
      DataError: Pillow is not installed.
    """
    try:
        from PIL import Image  # an extra
    except ImportError as error:
        raise DataError(
            f"Images are read and written by Pillow: {error}. Install it: {install_command('stack-train[images]')}"
        ) from error
    return Image


def turn_upright(image: Any) -> Any:
    """Decodes an opened image of Pillow, and turns it upright by its EXIF orientation."""
    image.load()  # which turns TIFF files and removes their orientation
    transposition = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION))
    return image if transposition is None else image.transpose(pillow().Transpose[transposition])


def upright_size(image: Any) -> tuple[int, int]:
    """Returns the upright height and width of an opened image of Pillow; decodes only TIFF files."""
    # Pillow may turn the size in the head of a TIFF file, depending on its version.
    width, height = turn_upright(image).size if image.format == "TIFF" else image.size
    turned = image.getexif().get(_ORIENTATION) in _ON_THEIR_SIDE
    return (width, height) if turned and image.format != "TIFF" else (height, width)
