"""Batches of labelled images in memory or in a memory-mapped file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Batch, Batches, Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.buckets import BatchOrder
from stack_train.data.cache import digest_of
from stack_train.data.rows import TrainIterator, filled, iterate_batches, iterate_rows
from stack_train.data.split import split_documents
from stack_train.diffusion.denoiser import ImagesConfig

__all__ = ["ImageBatches", "ImageRows", "ImageSettings", "LabelledImages", "as_pixels", "check_images"]


@config
class ImageSettings:
    """Batch settings shared by all image data.

    A batch contains images, float32[batch, height, width, channels] from -1 (black) to 1 (white), and weights,
    float32[batch], which are 1 for images and 0 for rows that fill the last validation batch.

    Attributes:
      batch_size: images per batch, over all processes.
      validation_fraction: fraction of the images held out for validation; copies of an image go to the same split.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
    """

    batch_size: PositiveInt = 64
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2

    @property
    def encoders(self) -> str | None:
        """Diffusers directory whose encoders make latents and conditions of the data; None for pixels."""
        return None

    def work(self) -> tuple[str, int]:
        return "images", self.batch_size

    def shapes(self, size: int, channels: int, *, labelled: bool) -> Shapes:
        """Returns the shapes and dtypes of a batch's arrays."""
        rows = self.batch_size
        labels = {"labels": jax.ShapeDtypeStruct((rows,), np.int32)} if labelled else {}
        return {
            "images": jax.ShapeDtypeStruct((rows, size, size, channels), np.float32),
            **labels,
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
        }


def check_images(model: Any, *, size: int | None, channels: tuple[int, ...], classes: int, label: str) -> None:
    """Checks that a model accepts images of a size, a number of channels and a number of classes.

    Args:
      model: the model's config.
      size: side of the images in pixels; None for images that can be scaled to any size.
      channels: numbers of channels that the images can have.
      classes: number of classes; 0 accepts any.
      label: name of the data in messages.

    Raises:
      ConfigError: the model is not an image model, or differs; the message lists the config keys and expected values.
    """
    if not isinstance(model, ImagesConfig):
        raise ConfigError(f"Data of {label} needs a model of images, not family {model.name!r}; use dit.")
    wrong: list[str] = []
    if size not in (None, model.image_size):
        wrong.append(f"model.image_size is {model.image_size}, not {size}")
    if model.channels not in channels:
        wrong.append(f"model.channels is {model.channels}, not {' or '.join(map(str, channels))}")
    if model.classes and model.classes < classes:
        wrong.append(f"model.classes is {model.classes}, fewer than {classes} (0 trains without labels)")
    if wrong:
        raise ConfigError(f"The model does not fit the images of {label}: {'; '.join(wrong)}.")


@runtime_checkable
class ImageRows(Protocol):
    """Interface of image datasets, independent of their storage.

    Attributes:
      names: readable name of each image.
      identity: digests and settings that identify the data, for the fingerprint of an iterator state.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def digests(self) -> UInt64[np.ndarray, " images"]:
        """Returns the content hash of each image. Duplicates go to the same split."""
        ...

    def arrays(self, places: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        """Returns the images at some indices, with their labels or conditions."""
        ...


@dataclass(frozen=True)
class LabelledImages:
    """Images stored as integers; see `ImageRows`.

    Attributes:
      pixels: uint8 pixels of each image.
      labels: class of each image, or None without labels.
      names: readable name of each image.
    """

    pixels: UInt8[np.ndarray, "images *frames height width channels"]
    labels: Int32[np.ndarray, " images"] | None
    names: Sequence[str]

    @property
    def identity(self) -> Mapping[str, Any]:
        labels = None if self.labels is None else self.labels.tolist()
        return {"the images (digest)": digest_of(self.digests().tolist(), labels)}

    def digests(self) -> UInt64[np.ndarray, " images"]:
        # As text, because `digest_of` takes JSON values.
        return np.array([int(digest_of(image.tobytes().hex())[:16], 16) for image in self.pixels], np.uint64)

    def arrays(self, places: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        labels = {} if self.labels is None else {"labels": self.labels[places]}
        # Converted for each batch: as floats, all images would take four times the memory.
        return {"images": self.pixels[places].astype(np.float32) / 127.5 - 1.0, **labels}


class ImageBatches(Batches):
    """Batches of images; see `Batches`.

    Attributes:
      training, validation: indices of the training images and of the held-out images.
    """

    def __init__(
        self,
        settings: ImageSettings,
        images: ImageRows,
        *,
        seed: int,
        bucket_of: Int64[np.ndarray, " images"] | None = None,
    ) -> None:
        """Splits images into training and validation.

        Args:
          bucket_of: bucket of each image, of which each batch has only one; None for images of one size.
        """
        self._settings, self._images, self._seed, self._bucket_of = settings, images, seed, bucket_of
        self.training, self.validation = split_documents(images.digests(), settings.validation_fraction)
        self._fingerprint = {
            "seed": seed,
            "data.batch_size": settings.batch_size,
            "data.validation_fraction": settings.validation_fraction,
            **images.identity,
        }

    def train_iterator(self) -> TrainIterator:
        """Returns an iterator over training batches, shuffled in each epoch; batch i depends only on (seed, i)."""
        rows, size, prefetched = len(self.training), self._settings.batch_size, self._settings.prefetch_batches

        def make_batch(ids: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
            # Ids count rows over all epochs.
            return self._batch(self.training[ids % rows], ids)

        if self._bucket_of is not None:
            order = BatchOrder(self._bucket_of[self.training], size, self._seed)
            return TrainIterator(iterate_batches(order, make_batch, prefetch_batches=prefetched), self._fingerprint)
        return iterate_rows(
            rows,
            make_batch,
            seed=self._seed,
            batch_size=size,
            prefetch_batches=prefetched,
            fingerprint=self._fingerprint,
        )

    def validation_batches(self) -> Iterator[Batch]:
        """Yields all held-out images once; held-out image r has the row id -1 - r."""
        size, count = self._settings.batch_size, len(self.validation)
        buckets = np.zeros(count) if self._bucket_of is None else self._bucket_of[self.validation]
        for bucket in np.unique(buckets):
            members = np.flatnonzero(buckets == bucket)
            for first in range(0, len(members), size):
                rows = members[first : first + size]
                batch = self._batch(self.validation[rows], -1 - rows)
                yield {name: filled(values, size, name) for name, values in batch.items()}

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the image of each row."""
        training, validation = self.training, self.validation
        places = [training[row % len(training)] if row >= 0 else validation[-1 - row] for row in row_ids.tolist()]
        return [self._images.names[place] for place in places]

    def _batch(self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        return {
            **self._arrays(places, row_ids),
            "weights": np.ones(len(places), np.float32),
            "row_ids": row_ids,
        }

    def _arrays(self, places: Int64[np.ndarray, " rows"], row_ids: Int64[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        """Returns the images at some indices; random choices depend only on the seed and the row ids."""
        return self._images.arrays(places)


def as_pixels(images: np.ndarray | jax.Array) -> UInt8[np.ndarray, "images *frames height width channels"]:
    """Converts images or videos from [-1, 1] to uint8 pixels from 0 to 255, clipping values outside of the range."""
    return np.round((np.clip(np.asarray(images, np.float32), -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
