"""Images of a step: the device's features of recent images, and the tokens that they replace."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.text.images import ImageReader
from stack_serve.llm.sequence import Sequence

__all__ = ["FeatureSlots", "StepImages", "feature_shape", "images_of_rows", "token_rows"]


@dataclass(frozen=True)
class StepImages:
    """The image tokens of a step.

    Attributes:
      rows: int32[tokens], row of the feature pool of each token of the step; -1 for text.
      ahead: int32[tokens], see `ImageTokens`.
    """

    rows: np.ndarray
    ahead: np.ndarray


class FeatureSlots:
    """Assigns slots of the feature pool to images by the digest of their pixels; the least recently used is replaced.

    Args:
      slots: number of slots, at least the images of a step.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def slot(self, image: PromptImage) -> tuple[int, bool]:
        """Returns the slot of an image, and whether its features must be computed."""
        if (slot := self._slot_of.get(image.digest)) is not None:
            self._slot_of.move_to_end(image.digest)
            return slot, False
        full = len(self._slot_of) == self.slots
        slot = self._slot_of.popitem(last=False)[1] if full else len(self._slot_of)
        self._slot_of[image.digest] = slot
        return slot, True

    def clear(self) -> None:
        """Forgets all images, whose features are of old weights."""
        self._slot_of.clear()


def images_of_rows(rows: Iterable[Any]) -> list[tuple[int, PromptImage]]:
    """Returns the images of a step with the places of their first tokens in the step.

    The scheduler never divides an image between steps.
    """
    found, place = list[tuple[int, PromptImage]](), 0
    for row in rows:
        sequence: Sequence = row.sequence
        inside = (image for image in sequence.images if row.start <= image.start < row.start + row.tokens)
        found += [(place + image.start - row.start, image) for image in inside]
        place += row.tokens
    return found


def token_rows(tokens: int, images: Iterable[tuple[int, int, int]]) -> StepImages:
    """Returns the arrays of a step; `images` are (first place, number of tokens, slot)."""
    rows, ahead = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    for place, count, slot in images:
        rows[place : place + count] = slot * count + np.arange(count)
        ahead[place : place + count] = np.arange(count)[::-1]
    return StepImages(rows, ahead)


def feature_shape(checkpoint: GenerativeCheckpoint, reader: ImageReader) -> Any:
    """Returns the shape and dtype of the features of one image, [tokens, embed]."""
    pixels = jax.ShapeDtypeStruct((1, *reader.shape), np.uint8)

    def features(params: Any, pixels: Any) -> Any:
        model: Any = checkpoint.model(params)
        return model.image_features(pixels)[0]

    return jax.eval_shape(features, checkpoint.parameters, pixels)
