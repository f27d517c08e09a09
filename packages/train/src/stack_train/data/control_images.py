"""Control images, such as edges or depths, that describe the images of a folder to a ControlNet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import DataError
from stack_core.abi.local_paths import local_path
from stack_train.data.files import listing
from stack_train.data.image_files import FileImages, ImageSize, image_sizes, read_images
from stack_train.data.image_source import ImageFiles

__all__ = ["ControlsConfig", "read_controls"]

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@config
class ControlsConfig:
    """Control images of captioned images.

    Attributes:
      folder: folder of the control images. They have the paths that the images have below the first folder of
        `data.source`, with any suffix of png, jpg, jpeg or webp, and the same ratio of width to height.
      pixels_per_latent: factor by which the autoencoder divides the sides of an image.
    """

    folder: str
    pixels_per_latent: PositiveInt = 8


def read_controls(
    read: Mapping[ImageSize, FileImages], *, source: str, folder: str
) -> list[UInt8[np.ndarray, "_ height width 3"]]:
    """Reads the control images, scaled and cropped like their images.

    Args:
      read: the images of each size.
      source: glob of the images.
      folder: folder of the control images.

    Raises:
      DataError: control images are missing, cannot be read, or have another ratio than their images; lists the files.
    """
    root, base = _root(source), local_path(folder).absolute()
    files = {name: _control_file(base / Path(name).relative_to(root)) for each in read.values() for name in each.names}
    _check([name for name, path in files.items() if path is None], f"have no control image in {folder}")
    paths: dict[str, Path] = {name: path for name, path in files.items() if path is not None}
    _check_ratios(paths)
    return [
        read_images(
            ImageFiles([paths[name] for name in each.names]), size=size, channels=3, unreadable="error", source=folder
        ).pixels
        for size, each in read.items()
    ]


def _root(source: str) -> Path:
    """Returns the folder of a glob before its first wildcard."""
    parts = local_path(source).absolute().parts
    plain = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
    return Path(*parts[:plain])


def _control_file(path: Path) -> Path | None:
    candidates = dict.fromkeys([path, *(path.with_suffix(suffix) for suffix in _SUFFIXES)])
    return next((each for each in candidates if each.is_file()), None)


def _check_ratios(paths: Mapping[str, Path]) -> None:
    # Sorted like the glob, for which buckets have cached the sizes already.
    originals, controls = (image_sizes(ImageFiles(each)) for each in (sorted(map(Path, paths)), [*paths.values()]))
    wrong: list[str] = []
    for name, path in paths.items():
        if str(path) not in controls:  # `read_images` reports this file
            continue
        (height, width), (rows, columns) = originals[name], controls[str(path)]
        # Their scaled sizes may differ by rounding.
        if abs(height * columns - width * rows) > max(height, width, rows, columns):
            wrong.append(f"{name} ({width}x{height}, control image {columns}x{rows})")
    _check(wrong, "have a control image of another ratio of width to height")


def _check(wrong: Sequence[str], problem: str) -> None:
    if wrong:
        raise DataError(f"{len(wrong)} images {problem}:\n  {listing(wrong)}")
