"""Images of a subject's class, which preserve the model's prior while it learns the subject (DreamBooth).

Source: Ruiz et al., DreamBooth, 2022 (arXiv:2208.12242).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.files import expand_glob
from stack_train.data.image_files import FileImages, ImageSize, OnUnreadable, read_images
from stack_train.data.image_source import ImageFiles

__all__ = ["PriorConfig", "PriorPairs", "check_prior", "join_prior"]


@config
class PriorConfig:
    """Images of the class, sampled by the model before the training.

    Attributes:
      source: glob of the image files.
      caption: caption of all of them, without the subject's identifier.
      weight: factor of their loss, which is added to the loss of the subject's images.
    """

    source: str
    caption: str
    weight: NonNegativeFloat = 1.0


def check_prior(prior: PriorConfig, *, batch_size: int, excluded: Mapping[str, object]) -> None:
    """Raises a ConfigError for an odd batch size, or for settings that do not combine with a prior.

    Args:
      excluded: values of these settings by key; None if they are not set.
    """
    if batch_size % 2:
        raise ConfigError(
            f"data.batch_size is {batch_size}; with data.prior, half of a batch is from each source. Give an even size."
        )
    if present := [name for name, value in excluded.items() if value is not None]:
        raise ConfigError(f"data.prior does not combine with data.{' and data.'.join(present)}. Leave one out.")
    if not prior.caption.strip():
        raise ConfigError("data.prior.caption is empty. Give the caption of the class, such as 'a photo of a dog'.")


def join_prior(
    images: FileImages, prior: PriorConfig, *, size: ImageSize, channels: int, unreadable: OnUnreadable
) -> FileImages:
    """Reads the images of the class, and appends them to the images of the subject."""
    files = ImageFiles(expand_glob(prior.source, "captioned"))
    found = read_images(files, size=size, channels=channels, unreadable=unreadable, source=prior.source)
    if common := set(images.names) & set(found.names):
        raise DataError(
            f"{min(common)} is an image of both data.source and data.prior.source. Keep the images of the "
            "subject and of the class in two folders."
        )
    originals = None
    if images.originals is not None and found.originals is not None:
        originals = [*images.originals, *found.originals]
    return FileImages(
        np.concatenate([images.pixels, found.pixels]),
        [*images.names, *found.names],
        [*images.unreadable, *found.unreadable],
        originals,
    )


@dataclass(frozen=True)
class PriorPairs:
    """Pairs of an image of the subject and an image of its class; the shorter list is repeated.

    Pair p has the row ids 2 p for the subject and 2 p + 1 for the class.

    Attributes:
      subject, prior: indices of the training images.
      weight: factor of the loss of the images of the class.
    """

    subject: Int64[np.ndarray, " subject"]
    prior: Int64[np.ndarray, " prior"]
    weight: float

    @classmethod
    def of(
        cls, training: Int64[np.ndarray, " training"], is_prior: Bool[np.ndarray, " images"], weight: float
    ) -> "PriorPairs":
        """Divides the training images; all images of the class are used in training."""
        return cls(training[~is_prior[training]], np.flatnonzero(is_prior), weight)

    def __len__(self) -> int:
        return max(len(self.subject), len(self.prior))

    def row_ids(self, pairs: Int64[np.ndarray, " pairs"]) -> Int64[np.ndarray, " rows"]:
        """Returns the rows of a batch, the subject first."""
        return np.concatenate([2 * pairs, 2 * pairs + 1])

    def places(self, row_ids: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """Returns the index of the image of each row."""
        pairs = row_ids // 2 % len(self)
        of_subject, of_prior = (each[pairs % len(each)] for each in (self.subject, self.prior))
        return np.where(row_ids % 2, of_prior, of_subject)

    def loss_weights(self, row_ids: Int64[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        """Returns the factor of each row's loss in the mean over a batch; 1 for held-out images.

        With equal halves, mean_b(w_b loss_b) is the mean of the subject plus `weight` times the mean of the class for
        w_b = 2 and 2 `weight`.
        """
        factors = np.where(row_ids % 2, 2.0 * self.weight, 2.0)
        return np.where(row_ids < 0, 1.0, factors).astype(np.float32)
