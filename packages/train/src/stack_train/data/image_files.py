"""Image files, cropped and scaled to squares of one size and cached."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from stack_core.abi.errors import DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.cache import cached, digest_of
from stack_train.data.files import stat_digest
from stack_train.diffusion.grid import pillow, turn_upright

__all__ = [
    "IMAGE_CHANNELS",
    "FileImages",
    "OnUnreadable",
    "mode_of",
    "read_images",
    "report_unreadable",
    "square_pixels",
]

_FORMAT = 2
_MODES = {1: "L", 3: "RGB"}
_NAMED = 10
_PIXELS, _FACTS = "pixels.npy", "facts.json"

IMAGE_CHANNELS = tuple(_MODES)
"""Numbers of channels that image files can be read with: 1 (grey) or 3 (RGB)."""

OnUnreadable = Literal["error", "skip"]
"""Policy for files that cannot be read as images: raise an error, or skip them with a warning that lists them."""


@dataclass(frozen=True)
class FileImages:
    """The images or videos read from files.

    Attributes:
      pixels: uint8 pixels of each image, memory-mapped.
      names: path of each image.
      unreadable: path of each file that could not be read as an image, with the reason.
    """

    pixels: UInt8[np.ndarray, "images *frames height width channels"]
    names: Sequence[str]
    unreadable: Sequence[str]


def read_images(
    files: Sequence[Path], *, size: int, channels: int, unreadable: OnUnreadable, source: str
) -> FileImages:
    """Reads image files into one memory-mapped array: the centre square of each, scaled to `size` x `size` pixels.

    Their EXIF orientation is applied. The array is stored in the user's cache.

    Args:
      files: paths of the image files.
      size: side of the resulting images in pixels.
      channels: number of channels, from `IMAGE_CHANNELS`.
      unreadable: policy for files that cannot be read as images.
      source: name of the files in messages.

    Raises:
      DataError: Pillow is not installed, a file cannot be read, or no file is an image.
    """
    images = _read(files, size, _MODES[channels])
    if images.unreadable:
        report_unreadable(images.unreadable, len(images.names), unreadable)
    if not images.names:
        raise DataError(f"{source} holds no image. Point data.source at files with some.")
    return images


def _read(files: Sequence[Path], size: int, mode: str) -> FileImages:

    def build(folder: Path) -> None:
        names: list[str] = []
        unreadable: list[str] = []
        channels = {name: number for number, name in _MODES.items()}[mode]
        shape = (len(files), size, size, channels)
        # Room for all files; rows of unreadable ones remain unused at the end and are cut off when the array is opened.
        pixels = np.lib.format.open_memmap(folder / _PIXELS, mode="w+", dtype=np.uint8, shape=shape)
        for path, image in _decoded(files, size, mode):
            if isinstance(image, str):
                unreadable.append(f"{path}: {image}")
            else:
                pixels[len(names)] = image.reshape(shape[1:])
                names.append(str(path))
        pixels.flush()
        (folder / _FACTS).write_text(json.dumps({"names": names, "unreadable": unreadable}), encoding="utf-8")

    settings = digest_of(_FORMAT, size, mode)
    digest = stat_digest(((str(path), path) for path in files), [settings])
    entry = cached(user_cache_dir() / "images" / digest, build)
    facts = json.loads((entry / _FACTS).read_text(encoding="utf-8"))
    pixels = np.load(entry / _PIXELS, mmap_mode="r")
    return FileImages(pixels[: len(facts["names"])], facts["names"], facts["unreadable"])


def _decoded(files: Sequence[Path], size: int, mode: str) -> Iterator[tuple[Path, np.ndarray | str]]:
    """Yields each file with its pixels, or with the reason why it cannot be read."""
    image = pillow()
    for path in files:
        try:
            with image.open(path) as opened:
                yield path, square_pixels(turn_upright(opened), size, mode)
        except (
            OSError,
            ValueError,
            SyntaxError,
            image.DecompressionBombError,
        ) as error:  # the exceptions of Pillow's decoders
            yield path, f"{type(error).__name__}: {error}"


def mode_of(channels: int) -> str:
    """Returns Pillow's mode of images with a number of channels from `IMAGE_CHANNELS`."""
    return _MODES[channels]


def square_pixels(upright: Any, size: int, mode: str) -> UInt8[np.ndarray, "height width *channels"]:
    """Crops an image of Pillow to its centre square, scaled to `size` x `size` pixels."""
    side = min(upright.size)
    left, top = ((length - side) // 2 for length in upright.size)
    # Converted first, because colors of a palette cannot be averaged by index.
    square = upright.convert(mode).crop((left, top, left + side, top + side))
    return np.asarray(square.resize((size, size), pillow().Resampling.LANCZOS))


def report_unreadable(unreadable: Sequence[str], read: int, policy: OnUnreadable, kind: str = "images") -> None:
    """Raises an error or warns about files that cannot be read as images or as another kind."""
    more = f"\n  and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    listing = "\n  ".join(unreadable[:_NAMED]) + more
    counted = f"{len(unreadable)} of {len(unreadable) + read} files cannot be read as {kind}"
    if policy == "error":
        raise DataError(f"{counted}:\n  {listing}\nRepair or remove them, or set data.unreadable to skip.")
    warnings.warn(f"{counted}; they are skipped:\n  {listing}", stacklevel=4)
