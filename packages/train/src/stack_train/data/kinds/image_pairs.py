"""`data.name: image_pairs`: pairs of a preferred and a rejected image of one caption or label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int64, UInt64
from pydantic import PositiveInt

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.cache import digest_of
from stack_train.data.captions import Captions
from stack_train.data.files import expand_glob, listing
from stack_train.data.image_batches import ImageBatches, ImageRows, ImageSettings, LabelledImages, check_images
from stack_train.data.image_files import IMAGE_CHANNELS, FileImages, image_sizes, read_images
from stack_train.data.image_source import ImageFiles
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.captioned import EncoderIdentity, TextConditioned, encode_captioned, encoded_spec
from stack_train.diffusion.denoiser import ImagesConfig, VideosConfig
from stack_train.diffusion.pipeline import open_encoders

__all__ = ["ImagePairBatches", "ImagePairsData"]


@config
class ImagePairsData(ImageSettings):
    """Preference pairs of images in JSONL files, one record per line; needs stack-train[images].

    A record has `chosen` and `rejected`, paths of image files relative to the JSONL file; `caption`, a text, for
    denoisers with text conditions; and `label`, a number, for denoisers with classes. The two images of a pair have the
    same size in their files. They are cropped and scaled as data of kind `captioned` or, without `pipeline`, `images`.

    A batch contains "images", float32[batch, 2, height, width, channels], the chosen image first; "weights"; and the
    condition of each pair, as in data of kind `captioned` or "labels".

    Attributes:
      source: glob of JSONL files.
      pipeline: diffusers directory with the encoders of the denoiser's training; None for denoisers of pixels.
      name: selects this kind of data. See `ImageSettings` for more fields; a batch has `batch_size` pairs.
      encoded_at_once: batch size of the encoders, in images or captions.
    """

    source: str
    pipeline: str | None = None
    name: Literal["image_pairs"] = "image_pairs"
    encoded_at_once: PositiveInt = 16

    @property
    def encoders(self) -> str | None:
        return self.pipeline

    def work(self) -> tuple[str, int]:
        return "pairs", self.batch_size

    def spec(self, model: Any) -> Shapes:
        shapes = self.call_spec(model)
        rows, *size = shapes["images"].shape
        return {**shapes, "images": jax.ShapeDtypeStruct((rows, 2, *size), np.float32)}

    def call_spec(self, model: Any) -> Shapes:
        """Returns the shapes of one image of each pair: float32[batch, height, width, channels]."""
        if self.pipeline is None:
            return self.shapes(model.image_size, model.channels, labelled=model.classes > 0)
        return encoded_spec(self, model)

    def check(self, model: Any) -> None:
        family = model.name
        if not isinstance(model, ImagesConfig) or isinstance(model, VideosConfig):
            raise ConfigError(f"Data of kind image_pairs are for denoisers of images, not for family {family!r}.")
        has_text = isinstance(model, TextConditioned)
        if self.pipeline is None and has_text:
            raise ConfigError(
                f"Family {family!r} reads latents and captions, and data.pipeline, the directory of the encoders, "
                "is missing. Set it to the pipeline of the run's start."
            )
        if self.pipeline is not None and not has_text:
            raise ConfigError(f"Family {family!r} reads no captions, which data.pipeline encodes. Leave it out.")
        if self.pipeline is None:
            check_images(model, size=None, channels=IMAGE_CHANNELS, classes=0, label="kind image_pairs")
            if changed_fields(self, ("encoded_at_once",)):
                raise ConfigError("data.encoded_at_once would have no effect without data.pipeline. Leave it out.")

    def build(self, *, seed: int, model: Any) -> "ImagePairBatches":
        """Reads the pairs, and encodes the images and captions that are not in the cache.

        Raises:
          DataError: Pillow is not installed, a record is malformed, a file is not an image, or the images of a pair
            have different sizes or equal pixels.
          ConversionError: `pipeline` lacks an encoder, or an encoder does not fit the model.
        """
        records = list(jsonl_records(expand_glob(self.source, self.name)))
        if not records:
            raise DataError(f"{self.source} holds no pair. Point data.source at files with some.")
        files = [_file(name, record, field) for field in ("chosen", "rejected") for name, record in records]
        _check_sizes(records, files)
        identity = None
        if self.pipeline is None:
            read = self._read(files, model.image_size, model.channels)
            labels = [_label(name, record, model.classes) for name, record in records] if model.classes else None
            twice = None if labels is None else np.array([*labels, *labels], np.int32)
            images: ImageRows = LabelledImages(read.pixels, twice, read.names)
        else:
            captions = [Captions.parse(name, _caption(name, record)) for name, record in records]
            directory = Path(self.pipeline.removeprefix("hf:")).expanduser()
            encoders = open_encoders(directory, text_tokens=model.text_tokens, text_dim=model.text_dim)
            encoders.check(model)
            side = model.image_size * encoders.autoencoder.config.downsampling
            read = self._read(files, side, encoders.autoencoder.config.channels)
            images, identity = encode_captioned(
                encoders, {(side, side): read}, [*captions, *captions], model=model, at_once=self.encoded_at_once
            )
        pairs = _Pairs(images, [name for name, _ in records])
        pairs.check()
        return ImagePairBatches(self, pairs, seed=seed, identity=identity)

    def _read(self, files: Sequence[Path], side: int, channels: int) -> FileImages:
        """Reads square images; all files must be readable, because the places of the images are the pairs'."""
        settings: Any = {"channels": channels, "unreadable": "error", "source": self.source}
        return read_images(ImageFiles(files), size=(side, side), **settings)


def _file(name: str, record: Mapping[str, Any], field: str) -> Path:
    value = record.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"{name}: {field!r} is {value!r}; expected the path of an image, relative to the JSONL file.")
    path = Path(name.rpartition(":")[0]).parent / value
    if not path.is_file():
        raise DataError(f"{name}: {field!r} is {value!r}, and {path} is not a file. Correct the path.")
    return path


def _caption(name: str, record: Mapping[str, Any]) -> str:
    value = record.get("caption")
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name}: 'caption' is {value!r}; expected the text that both images were made for.")
    return value.strip()


def _label(name: str, record: Mapping[str, Any], classes: int) -> int:
    value = record.get("label")
    if type(value) is not int or not 0 <= value < classes:  # a bool is an int to isinstance
        raise DataError(f"{name}: 'label' is {value!r}; expected a number from 0 to {classes - 1} (model.classes).")
    return value


def _check_sizes(records: Sequence[tuple[str, Any]], files: Sequence[Path]) -> None:
    """Raises a DataError if the two images of a pair have different sizes; crops would differ in content."""
    sizes, count = image_sizes(ImageFiles(files)), len(records)
    wrong = []
    for place, (name, _) in enumerate(records):
        # `read_images` reports files without a size.
        chosen, rejected = (sizes.get(str(files[each])) for each in (place, place + count))
        if chosen is not None and rejected is not None and chosen != rejected:
            wrong.append(f"{name}: {chosen[1]}x{chosen[0]} and {rejected[1]}x{rejected[0]}")
    if wrong:
        raise DataError(
            f"The images of {len(wrong)} of {count} pairs have different sizes:\n  {listing(wrong)}\nScale or crop the "
            "images of each pair to one size."
        )


@dataclass(frozen=True)
class _Pairs:
    """Pairs of images as `ImageRows`: image i of `images` is preferred to image i + pairs.

    Attributes:
      images: all preferred images, then all rejected ones.
      names: "path:line" of each pair.
    """

    images: ImageRows
    names: Sequence[str]

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.images.identity

    def digests(self) -> UInt64[np.ndarray, " pairs"]:
        both = self.images.digests().reshape(2, -1)
        return np.array([int(digest_of(pair)[:16], 16) for pair in both.T.tolist()], np.uint64)

    def arrays(self, places: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        chosen, rejected = (self.images.arrays(places + first) for first in (0, len(self.names)))
        return {**chosen, "images": np.stack([chosen["images"], rejected["images"]], axis=1)}

    def check(self) -> None:
        """Raises a DataError if the images of a pair are equal."""
        chosen, rejected = self.images.digests().reshape(2, -1)
        if equal := [name for name, same in zip(self.names, chosen == rejected, strict=True) if same]:
            raise DataError(
                f"The two images of {len(equal)} of {len(self.names)} pairs are equal:\n  {listing(equal)}\nRemove the "
                "pairs, which express no preference."
            )


class ImagePairBatches(ImageBatches):
    """Batches of pairs; `write` stores the identity of the encoders, if any."""

    def __init__(self, settings: ImagePairsData, pairs: _Pairs, *, seed: int, identity: EncoderIdentity | None) -> None:
        super().__init__(settings, pairs, seed=seed)
        self._encoder_identity = identity

    def write(self, directory: Path) -> None:
        if self._encoder_identity is not None:
            self._encoder_identity.write(directory)
