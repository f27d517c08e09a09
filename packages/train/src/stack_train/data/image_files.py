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
    "CropRule",
    "FileImages",
    "ImageScaling",
    "OnUnreadable",
    "mode_of",
    "read_images",
    "report_unreadable",
]

_FORMAT = 2
_MODES = {1: "L", 3: "RGB"}
_NAMED = 10
_PIXELS, _FACTS = "pixels.npy", "facts.json"

IMAGE_CHANNELS = tuple(_MODES)
"""Numbers of channels that image files can be read with: 1 (grey) or 3 (RGB)."""

OnUnreadable = Literal["error", "skip"]
"""Policy for files that cannot be read as images: raise an error, or skip them with a warning that lists them."""

CropRule = Literal["before", "after", "none"]
"""Place of the crop: the centre square before scaling or after it, or none, which changes the proportions."""


@dataclass(frozen=True)
class ImageScaling:
    """Scaling of images to squares of one size.

    Attributes:
      resample: filter of Pillow.
      crop: see `CropRule`.
    """

    resample: Literal["lanczos", "bilinear", "bicubic"] = "lanczos"
    crop: CropRule = "before"

    def __call__(self, image: Any, size: int) -> Any:
        """Scales an upright image of Pillow to `size` x `size` pixels."""
        resample = pillow().Resampling[self.resample.upper()]
        if self.crop == "none":
            return image.resize((size, size), resample)
        short = min(image.size)
        if self.crop == "before":
            left, top = ((length - short) // 2 for length in image.size)
            return image.crop((left, top, left + short, top + short)).resize((size, size), resample)
        # As in transformers: the longer side is rounded down.
        image = image.resize(tuple(size * length // short for length in image.size), resample)
        left, top = ((length - size) // 2 for length in image.size)
        return image.crop((left, top, left + size, top + size))


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
    files: Sequence[Path],
    *,
    size: int,
    channels: int,
    unreadable: OnUnreadable,
    source: str,
    scaling: ImageScaling = ImageScaling(),
) -> FileImages:
    """Reads image files into one memory-mapped array, scaled to `size` x `size` pixels.

    Their EXIF orientation is applied. The array is stored in the user's cache.

    Args:
      files: paths of the image files.
      size: side of the resulting images in pixels.
      channels: number of channels, from `IMAGE_CHANNELS`.
      unreadable: policy for files that cannot be read as images.
      source: name of the files in messages.
      scaling: scaling of each image; by default, of its centre square.

    Raises:
      DataError: Pillow is not installed, a file cannot be read, or no file is an image.
    """
    images = _read(files, size, _MODES[channels], scaling)
    if images.unreadable:
        report_unreadable(images.unreadable, len(images.names), unreadable)
    if not images.names:
        raise DataError(f"{source} holds no image. Point data.source at files with some.")
    return images


def _read(files: Sequence[Path], size: int, mode: str, scaling: ImageScaling) -> FileImages:
    def build(folder: Path) -> None:
        names: list[str] = []
        unreadable: list[str] = []
        channels = {name: number for number, name in _MODES.items()}[mode]
        shape = (len(files), size, size, channels)
        # Room for all files; rows of unreadable ones remain unused at the end and are cut off when the array is opened.
        pixels = np.lib.format.open_memmap(folder / _PIXELS, mode="w+", dtype=np.uint8, shape=shape)
        for path, image in _decoded(files, size, mode, scaling):
            if isinstance(image, str):
                unreadable.append(f"{path}: {image}")
            else:
                pixels[len(names)] = image.reshape(shape[1:])
                names.append(str(path))
        pixels.flush()
        (folder / _FACTS).write_text(json.dumps({"names": names, "unreadable": unreadable}), encoding="utf-8")

    # The default has the key of the folders that are cached already.
    others = () if scaling == ImageScaling() else (scaling.resample, scaling.crop)
    settings = digest_of(_FORMAT, size, mode, *others)
    digest = stat_digest(((str(path), path) for path in files), [settings])
    entry = cached(user_cache_dir() / "images" / digest, build)
    facts = json.loads((entry / _FACTS).read_text(encoding="utf-8"))
    pixels = np.load(entry / _PIXELS, mmap_mode="r")
    return FileImages(pixels[: len(facts["names"])], facts["names"], facts["unreadable"])


def _decoded(
    files: Sequence[Path], size: int, mode: str, scaling: ImageScaling
) -> Iterator[tuple[Path, np.ndarray | str]]:
    """Yields each file with its pixels, or with the reason why it cannot be read."""
    image = pillow()
    for path in files:
        try:
            with image.open(path) as opened:
                # Converted first, because colors of a palette cannot be averaged by index.
                yield path, np.asarray(scaling(turn_upright(opened).convert(mode), size))
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


def report_unreadable(unreadable: Sequence[str], read: int, policy: OnUnreadable, kind: str = "images") -> None:
    """Raises an error or warns about files that cannot be read as images or as another kind."""
    more = f"\n  and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    listing = "\n  ".join(unreadable[:_NAMED]) + more
    counted = f"{len(unreadable)} of {len(unreadable) + read} files cannot be read as {kind}"
    if policy == "error":
        raise DataError(f"{counted}:\n  {listing}\nRepair or remove them, or set data.unreadable to skip.")
    warnings.warn(f"{counted}; they are skipped:\n  {listing}", stacklevel=4)
