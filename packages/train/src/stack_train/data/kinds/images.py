"""`data.kind: images`: files of images, labelled by the folders that they lie in."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from stack_core.config import config
from stack_core.contracts.data import Shapes
from stack_core.errors import ConfigError, DataError
from stack_core.user_cache import user_cache_dir
from stack_train.data.cache import cached, digest_of
from stack_train.data.files import expand_glob, stat_digest
from stack_train.data.image_batches import ImageBatches, ImageSettings, LabelledImages, check_images
from stack_train.diffusion.grid import pillow

__all__ = ["ImagesData"]

_FORMAT = 1
_MODES = {1: "L", 3: "RGB"}
_NAMED = 10
_PIXELS, _FACTS = "pixels.npy", "facts.json"


@config
class ImagesData(ImageSettings):
    """Images in files, of any format that Pillow reads; needs stack-train[images].

    Each is cut to its middle square and scaled to the model's `image_size`, in colour or in grey by its `channels`; the
    result is kept in the user's cache and mapped from there. For a model with classes, the folders that images lie in
    are the labels, numbered by name.

    Attributes:
      source: files, as a glob; `**` matches any number of folders.
      unreadable: what becomes of files that are no images: "error", or "skip", which names and counts them.
    """

    source: str
    kind: Literal["images"] = "images"
    unreadable: Literal["error", "skip"] = "error"

    def spec(self, model: Any) -> Shapes:
        return self.shapes(model.image_size, model.channels, labelled=model.classes > 0)

    def check(self, model: Any) -> None:
        check_images(model, size=None, channels=tuple(_MODES), classes=0, what="kind images")

    def build(self, *, seed: int, model: Any) -> ImageBatches:
        """Reads every file that the cache does not hold.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, or none is an image.
          ConfigError: there are more folders than the model has classes.
        """
        images = _read(expand_glob(self.source, self.kind), model.image_size, _MODES[model.channels])
        if images.unreadable:
            _report(images.unreadable, len(images.names), self.unreadable)
        if not images.names:
            raise DataError(f"{self.source} holds no image. Point data.source at files with some.")
        folders = sorted({Path(name).parent.name for name in images.names})
        if model.classes and len(folders) > model.classes:
            raise ConfigError(
                f"The images lie in {len(folders)} folders, {', '.join(folders[:_NAMED])}, and model.classes is "
                f"{model.classes}. Raise it, or set it to 0 to learn without labels."
            )
        labels = np.array([folders.index(Path(name).parent.name) for name in images.names], np.int32)
        held = LabelledImages(images.pixels, labels, images.names)
        return ImageBatches(self, held, labelled=model.classes > 0, seed=seed)


@dataclass(frozen=True)
class _Images:
    """What was found in files; `unreadable` has those that are no images, each with the reason."""

    pixels: UInt8[np.ndarray, "images height width channels"]
    names: Sequence[str]
    unreadable: Sequence[str]


def _read(files: Sequence[Path], size: int, mode: str) -> _Images:
    """The images of files in one mapped array, made once."""

    def build(folder: Path) -> None:
        names: list[str] = []
        unreadable: list[str] = []
        channels = {name: number for number, name in _MODES.items()}[mode]
        shape = (len(files), size, size, channels)
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
    return _Images(pixels[: len(facts["names"])], facts["names"], facts["unreadable"])


def _decoded(files: Sequence[Path], size: int, mode: str) -> Iterator[tuple[Path, np.ndarray | str]]:
    """Each file with its pixels, or with the reason why it has none."""
    image = pillow()
    for path in files:
        try:
            with image.open(path) as opened:
                side = min(opened.size)
                left, top = ((length - side) // 2 for length in opened.size)
                square = opened.convert(mode).crop((left, top, left + side, top + side))
                small = square.resize((size, size), image.Resampling.LANCZOS)
                yield path, np.asarray(small)
        except (
            OSError,
            ValueError,
            SyntaxError,
            image.DecompressionBombError,
        ) as error:  # what Pillow's decoders raise
            yield path, f"{type(error).__name__}: {error}"


def _report(unreadable: Sequence[str], read: int, policy: Literal["error", "skip"]) -> None:
    """Raises, or warns, of files that are no images."""
    more = f"\n  and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    listing = "\n  ".join(unreadable[:_NAMED]) + more
    counted = f"{len(unreadable)} of {len(unreadable) + read} files are no images that can be read"
    if policy == "error":
        raise DataError(f"{counted}:\n  {listing}\nMend or remove them, or set data.unreadable to skip.")
    warnings.warn(f"{counted}; they are skipped:\n  {listing}", stacklevel=3)
