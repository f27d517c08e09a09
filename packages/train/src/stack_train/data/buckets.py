"""Buckets of images with one size each, and batches that each come from one bucket.

Source: aspect buckets of NovelAI (2022) and SDXL (Podell et al., 2023, arXiv:2307.01952, appendix I).
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import grain
import numpy as np
from jaxtyping import Int64
from pydantic import Field, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.image_files import ImageSize

__all__ = ["BatchOrder", "BucketsConfig", "bucket_sizes", "check_buckets"]

_BATCHES_OF_A_RUN = 1 << 40


@config
class BucketsConfig:
    """Sizes of images of several ratios, whose areas are just below the area of the model's square images.

    Widths are all multiples of `step_pixels` whose ratio to the height is within `max_ratio`. The height is the largest
    multiple with which the area does not exceed the square. Each of these sizes is also used with its sides swapped.

    Attributes:
      step_pixels: sides are multiples of this number of pixels.
      max_ratio: largest ratio of the longer to the shorter side. Images beyond it are cut.
      small: policy for buckets with fewer training images than a batch: "error", or "skip", which lists them in a
        warning and leaves their images out of the training.
    """

    step_pixels: PositiveInt = 64
    max_ratio: Annotated[float, Field(ge=1.0)] = 2.0
    small: Literal["error", "skip"] = "error"


def bucket_sizes(buckets: BucketsConfig, *, side: int, factor: int) -> list[ImageSize]:
    """Returns the heights and widths of all buckets, from wide to tall.

    Args:
      side: height and width in pixels of the model's square images.
      factor: number of pixels that must divide each side: the autoencoder's factor times the denoiser's patch.

    Raises:
      ConfigError: `factor` does not divide `step_pixels`, or `step_pixels` does not divide `side`.
    """
    step = buckets.step_pixels
    if step % factor:
        raise ConfigError(
            f"data.buckets.step_pixels is {step}, and the autoencoder and the patches of the denoiser divide sides by "
            f"{factor}. Give {' or '.join(map(str, _multiples(step, factor)))}."
        )
    if side % step:
        raise ConfigError(
            f"data.buckets.step_pixels is {step}, which does not divide the {side} pixels of the model's images "
            f"(model.image_size). Give a divisor of {side}, a multiple of {factor}."
        )
    sizes: set[ImageSize] = set()
    for width in range(step, side + 1, step):
        height = side**2 // width // step * step
        if height <= buckets.max_ratio * width:
            sizes |= {(height, width), (width, height)}
    return sorted(sizes)


def _multiples(number: int, factor: int) -> list[int]:
    """Returns the nearest positive multiples of a factor."""
    below = number // factor * factor
    return [each for each in (below, below + factor) if each]


def check_buckets(
    sizes: Sequence[ImageSize], training: Int64[np.ndarray, " training"], batch_size: int, buckets: BucketsConfig
) -> None:
    """Checks that every bucket with training images fills a batch.

    Args:
      sizes: sizes of the buckets.
      training: bucket of each training image.

    Raises:
      DataError: a bucket has too few images and `buckets.small` is "error", or no bucket has enough.
    """
    counts = np.bincount(training, minlength=len(sizes))
    small = [place for place in range(len(sizes)) if 0 < counts[place] < batch_size]
    if not small:
        return
    listing = ", ".join(f"{sizes[place][1]}x{sizes[place][0]} ({counts[place]})" for place in small)
    found = f"{len(small)} buckets have fewer training images than data.batch_size={batch_size}: {listing}"
    if buckets.small == "error" or counts.max() < batch_size:
        skips = "" if counts.max() < batch_size else ", or set data.buckets.small to skip to leave these images out"
        raise DataError(
            f"{found}. Raise data.buckets.step_pixels or lower data.buckets.max_ratio, which makes fewer buckets, or "
            f"lower data.batch_size{skips}."
        )
    warnings.warn(f"{found}. They are not trained on.", stacklevel=4)


class BatchOrder(grain.MapDataset[Any]):
    """Row ids of batches from one bucket each; batch i depends only on (seed, i).

    In each epoch, the rows of each bucket are shuffled and cut into full batches. This epoch omits the rest, fewer than
    a batch of each bucket. The batches of all buckets are then shuffled. Row r of epoch e has the id e * rows + r.

    Args:
      buckets: bucket of each row.
      batch_size: number of rows in a batch.
      seed: seed of the order.
    """

    def __init__(self, buckets: Int64[np.ndarray, " rows"], batch_size: int, seed: int) -> None:
        super().__init__()
        self._rows, self._batch_size, self._seed = len(buckets), batch_size, seed
        members = (np.flatnonzero(buckets == each) for each in np.unique(buckets))
        self._members = [rows for rows in members if len(rows) >= batch_size]
        self._batches = sum(len(rows) // batch_size for rows in self._members)
        self._of_epoch = lru_cache(2)(self._shuffled)

    def __len__(self) -> int:
        return _BATCHES_OF_A_RUN

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, place = divmod(int(index), self._batches)
        return epoch * self._rows + self._of_epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> Int64[np.ndarray, "batches batch"]:
        random, size = np.random.default_rng([self._seed, epoch]), self._batch_size
        batches = [
            random.permutation(rows)[: len(rows) // size * size].reshape(-1, size).astype(np.int64)
            for rows in self._members
        ]
        return random.permutation(np.concatenate(batches))
