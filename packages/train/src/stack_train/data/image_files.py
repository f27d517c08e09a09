"""Images of a source, cropped and scaled to one or several sizes and cached."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from stack_core.abi.errors import DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.cache import cached, digest_of
from stack_train.data.files import listing
from stack_train.data.image_source import ImageSource
from stack_train.diffusion.grid import pillow, turn_upright, upright_size

__all__ = [
    "IMAGE_CHANNELS",
    "CropRule",
    "FileImages",
    "ImageScaling",
    "ImageSize",
    "OnUnreadable",
    "cached_pixels",
    "check_read",
    "crop_offset",
    "decoder_errors",
    "image_sizes",
    "mode_of",
    "read_bucketed_images",
    "read_images",
]

_FORMAT = 2
_FORMAT_OF_SIZES = 1
_MODES = {1: "L", 3: "RGB"}
_PIXELS, _FACTS = "pixels.npy", "facts.json"

ImageSize = tuple[int, int]
"""Height and width of an image in pixels."""

IMAGE_CHANNELS = tuple(_MODES)
"""Numbers of channels that image files can be read with: 1 (grey) or 3 (RGB)."""

OnUnreadable = Literal["error", "skip"]
"""Policy for files that cannot be read as images: raise an error, or skip them with a warning that lists them."""


CropRule = Literal["before", "after", "none"]
"""Place of the crop: the largest centred part before scaling or after it, or none, which changes the proportions."""


@dataclass(frozen=True)
class ImageScaling:
    """Scaling of images to one size.

    Attributes:
      resample: filter of Pillow.
      crop: see `CropRule`.
    """

    resample: Literal["lanczos", "bilinear", "bicubic"] = "lanczos"
    crop: CropRule = "before"

    def __call__(self, image: Any, size: ImageSize) -> Any:
        """Scales an upright image of Pillow."""
        resample, (height, width) = pillow().Resampling[self.resample.upper()], size
        if self.crop == "before":
            image = image.crop(_centre(image.size, size))
        if self.crop != "after":
            return image.resize((width, height), resample)
        # As in transformers: the longer side is rounded down.
        whole_width, whole_height = image.size
        if width * whole_height >= height * whole_width:
            scaled = width, width * whole_height // whole_width
        else:
            scaled = height * whole_width // whole_height, height
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        return image.resize(scaled, resample).crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class FileImages:
    """The images or videos read from a source.

    Attributes:
      pixels: uint8 pixels of each image, memory-mapped.
      names: name of each image in the source, such as its path.
      unreadable: name of each file that could not be read as an image, with the reason.
      originals: height and width of each image in its file, upright; None without buckets.
    """

    pixels: UInt8[np.ndarray, "images *frames height width channels"]
    names: Sequence[str]
    unreadable: Sequence[str]
    originals: Sequence[ImageSize] | None = None


def read_images(
    images: ImageSource,
    *,
    size: ImageSize,
    channels: int,
    unreadable: OnUnreadable,
    source: str,
    scaling: ImageScaling = ImageScaling(),
) -> FileImages:
    """Reads images into one memory-mapped array, scaled to one size.

    Their EXIF orientation is applied. The array is stored in the user's cache.

    Args:
      images: the images.
      size: height and width of the resulting images.
      channels: number of channels, from `IMAGE_CHANNELS`.
      unreadable: policy for files that cannot be read as images.
      source: name of the files in messages.
      scaling: scaling of each image; by default, of its largest centred part with the ratio of `size`.

    Raises:
      DataError: Pillow is not installed, a file cannot be read, or no file is an image.
    """
    read = _read(images, range(len(images.names)), size, channels, scaling)
    check_read([*images.defects, *read.unreadable], len(read.names), unreadable, source, kind="image")
    return read


def read_bucketed_images(
    images: ImageSource, *, sizes: Sequence[ImageSize], channels: int, unreadable: OnUnreadable, source: str
) -> dict[ImageSize, FileImages]:
    """Reads images into one memory-mapped array for each size; an image has the size with the nearest ratio.

    An image is scaled to cover its size, and the excess is cut off on both sides alike. `read_images` describes the
    other arguments and errors.

    Args:
      sizes: sizes of the resulting images.

    Returns:
      The images of each size that has some.
    """
    originals, problems = _read_sizes(images)
    ratios = np.log([width / height for height, width in sizes])
    places_of: dict[ImageSize, list[int]] = {}
    for place, name in enumerate(images.names):
        if (original := originals.get(name)) is not None:
            nearest = int(np.argmin(np.abs(ratios - np.log(original[1] / original[0]))))
            places_of.setdefault(sizes[nearest], []).append(place)
    found = {size: _read(images, places_of[size], size, channels) for size in sizes if size in places_of}
    problems = [*images.defects, *problems, *(each for read in found.values() for each in read.unreadable)]
    check_read(problems, sum(len(read.names) for read in found.values()), unreadable, source, kind="image")
    return {
        size: replace(read, originals=[originals[name] for name in read.names])
        for size, read in found.items()
        if read.names
    }


def image_sizes(images: ImageSource) -> Mapping[str, ImageSize]:
    """Returns the upright size of each image that can be read, by name; cached."""
    return _read_sizes(images)[0]


def crop_offset(original: ImageSize, size: ImageSize) -> tuple[int, int]:
    """Returns the rows above and the columns left of the part of a scaled image that `read_bucketed_images` keeps."""
    scale = max(side / whole for side, whole in zip(size, original, strict=True))
    top, left = (round((whole * scale - side) / 2) for side, whole in zip(size, original, strict=True))
    return top, left


def _read_sizes(images: ImageSource) -> tuple[Mapping[str, ImageSize], Sequence[str]]:
    """Returns the upright size of each image by name, and the images that cannot be read; both from the cache."""
    names = images.names

    def build(folder: Path) -> None:
        image, sizes, unreadable = pillow(), dict[str, ImageSize](), list[str]()
        for place, name in enumerate(names):
            try:
                with images.open(place) as file, image.open(file) as opened:  # reads only the head of a file
                    sizes[name] = upright_size(opened)
            except decoder_errors() as error:
                unreadable.append(f"{name}: {_reason(error)}")
        (folder / _FACTS).write_text(json.dumps({"sizes": sizes, "unreadable": unreadable}), encoding="utf-8")

    digest = images.digest(range(len(names)), ["sizes", str(_FORMAT_OF_SIZES)])
    facts = json.loads((cached(user_cache_dir() / "images" / digest, build) / _FACTS).read_text(encoding="utf-8"))
    return {name: (height, width) for name, (height, width) in facts["sizes"].items()}, facts["unreadable"]


def _read(
    images: ImageSource,
    places: Sequence[int],
    size: ImageSize,
    channels: int,
    scaling: ImageScaling = ImageScaling(),
) -> FileImages:
    mode = mode_of(channels)
    # The default has the key of the folders that are cached already.
    others = () if scaling == ImageScaling() else (scaling.resample, scaling.crop)
    settings = digest_of(_FORMAT, size[0] if size[0] == size[1] else size, mode, *others)
    entry = user_cache_dir() / "images" / images.digest(places, [settings])
    return cached_pixels(entry, _decoded(images, places, size, mode, scaling), shape=(len(places), *size, channels))


def cached_pixels(
    entry: Path, decoded: Iterable[tuple[str, np.ndarray | str]], *, shape: tuple[int, ...]
) -> FileImages:
    """Decodes files into one array in the cache, unless it is there already, and maps the array into memory.

    Args:
      entry: folder of the array in the cache.
      decoded: name of each file with its pixels, or with the reason why it cannot be read; not iterated if the entry
        exists.
      shape: shape of the array if all files can be read.
    """

    def build(folder: Path) -> None:
        names: list[str] = []
        unreadable: list[str] = []
        # Room for all files; rows of unreadable ones remain unused at the end and are cut off when the array is opened.
        pixels = np.lib.format.open_memmap(folder / _PIXELS, mode="w+", dtype=np.uint8, shape=shape)
        for name, found in decoded:
            if isinstance(found, str):
                unreadable.append(f"{name}: {found}")
            else:
                pixels[len(names)] = found.reshape(shape[1:])
                names.append(name)
        pixels.flush()
        (folder / _FACTS).write_text(json.dumps({"names": names, "unreadable": unreadable}), encoding="utf-8")

    folder = cached(entry, build)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    pixels = np.load(folder / _PIXELS, mmap_mode="r")
    return FileImages(pixels[: len(facts["names"])], facts["names"], facts["unreadable"])


def _decoded(
    images: ImageSource, places: Sequence[int], size: ImageSize, mode: str, scaling: ImageScaling
) -> Iterator[tuple[str, np.ndarray | str]]:
    """Yields the name of each image with its pixels, or with the reason why it cannot be read."""
    image, names = pillow(), images.names
    for place in places:
        try:
            with images.open(place) as file, image.open(file) as opened:
                # Converted first, because colors of a palette cannot be averaged by index.
                found = np.asarray(scaling(turn_upright(opened).convert(mode), size))
        except decoder_errors() as error:
            yield names[place], _reason(error)
        else:
            yield names[place], found


def _reason(error: Exception) -> str:
    # Pillow's message contains the opened file rather than a name.
    is_unknown = type(error).__name__ == "UnidentifiedImageError"
    return f"{type(error).__name__}: {'not a format that Pillow reads' if is_unknown else error}"


def _centre(original: tuple[int, int], size: ImageSize) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of the largest centred part with the ratio of `size`.

    Args:
      original: width and height, in Pillow's order.
    """
    width, height = original
    part_width = max(1, min(width, round(height * size[1] / size[0])))
    part_height = max(1, min(height, round(width * size[0] / size[1])))
    left, top = (width - part_width) // 2, (height - part_height) // 2
    return left, top, left + part_width, top + part_height


def decoder_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions of Pillow's decoders."""
    return OSError, ValueError, SyntaxError, pillow().DecompressionBombError


def mode_of(channels: int) -> str:
    """Returns Pillow's mode of images with a number of channels from `IMAGE_CHANNELS`."""
    return _MODES[channels]


def check_read(unreadable: Sequence[str], read: int, policy: OnUnreadable, source: str, *, kind: str) -> None:
    """Raises an error or warns about unreadable files, by policy; raises an error if no file was read.

    Args:
      unreadable: files that could not be read, with the reason.
      read: number of files that were read.
      source: name of the files in messages.
      kind: "image" or "video".
    """
    if unreadable:
        counted = f"{len(unreadable)} of {len(unreadable) + read} files cannot be read as {kind}s"
        if policy == "error":
            raise DataError(
                f"{counted}:\n  {listing(unreadable)}\nRepair or remove them, or set data.unreadable to skip."
            )
        warnings.warn(f"{counted}; they are skipped:\n  {listing(unreadable)}", stacklevel=3)
    if not read:
        raise DataError(f"{source} holds no {kind}. Point data.source at some.")
