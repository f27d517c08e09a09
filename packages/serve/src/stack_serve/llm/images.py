"""Images of a step: the device's features of recent images, and the tokens that they replace."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.runtime.tree_paths import path_name
from stack_core.text.image_prompts import axis_positions
from stack_core.text.images import ImageReader, image_places

__all__ = [
    "FeatureRows",
    "StepImages",
    "count_feature_rows",
    "feature_shape",
    "images_between",
    "images_of_rows",
    "step_images",
    "tower_parameters",
]

_MIN_IMAGES, _USUAL_TOKENS = 16, 256


@dataclass(frozen=True)
class StepImages:
    """The image tokens of a step.

    Attributes:
      rows: int32[tokens], row of the feature pool of each token of the step; -1 for text.
      ahead: int32[tokens], see `ImageTokens`.
      positions: int32[tokens, 3], see `ImageTokens`; used if images have the layout "axes".
    """

    rows: np.ndarray
    ahead: np.ndarray
    positions: np.ndarray


class FeatureRows:
    """Assigns rows of the feature pool to images by the digest of their pixels; the least recently used are replaced.

    Attributes:
      capacity: number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows_of: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._free = np.arange(capacity, dtype=np.int32)

    def __len__(self) -> int:
        """Number of images with rows."""
        return len(self._rows_of)

    def __getitem__(self, image: PromptImage) -> np.ndarray:
        """Returns the rows of an image's tokens, int32[tokens]; raises a KeyError if it has none."""
        return self._rows_of[image.digest]

    def assign(self, images: Iterable[PromptImage]) -> list[PromptImage]:
        """Assigns rows to the images of a step, and returns the images whose features must be computed.

        Args:
          images: images whose distinct ones have at most `capacity` tokens, as the scheduler plans them.
        """
        distinct = {image.digest: image for image in images}
        new = [image for digest, image in distinct.items() if digest not in self._rows_of]
        # The images of the step become the most recent ones, so none of them is replaced below.
        for digest in distinct:  # in order: a set's depends on the hash seed
            if digest in self._rows_of:
                self._rows_of.move_to_end(digest)
        for image in new:
            while len(self._free) < image.tokens:
                self._free = np.concatenate([self._free, self._rows_of.popitem(last=False)[1]])
            self._rows_of[image.digest], self._free = self._free[: image.tokens], self._free[image.tokens :]
        return new

    def clear(self) -> None:
        """Forgets all images, whose features are of old weights."""
        self._rows_of.clear()
        self._free = np.arange(self.capacity, dtype=np.int32)


def images_of_rows(rows: Iterable[Any]) -> list[PromptImage]:
    """Returns the images of which a step computes tokens."""
    return [image for row in rows for image in images_between(row.sequence.images, row.start, row.start + row.tokens)]


def images_between(images: Iterable[PromptImage], start: int, end: int) -> list[PromptImage]:
    """Returns the images that have tokens in the places `start` to `end`, which excludes `end`."""
    return [image for image in images if image.start < end and start < image.end]


def count_feature_rows(reader: ImageReader, step_tokens: int) -> int:
    """Returns the number of rows of the feature pool.

    It has room for the images of two steps, for the largest image beside a step, and for several images of a usual
    size.
    """
    most = reader.sizes[-1]
    return max(2 * step_tokens, step_tokens + most, _MIN_IMAGES * min(most, _USUAL_TOKENS))


def step_images(rows: Sequence[Any], features: FeatureRows) -> StepImages:
    """Returns the arrays of a step, whose images have rows in `features`."""
    parts = []
    for row in rows:
        places, ahead = np.full(row.tokens, -1, np.int32), np.zeros(row.tokens, np.int32)
        for image in images_between(row.sequence.images, row.start, row.start + row.tokens):
            inside = image_places(image) - row.start
            numbers = np.flatnonzero((inside >= 0) & (inside < row.tokens))
            places[inside[numbers]] = features[image][numbers]
            ahead[inside[numbers]] = image.tokens - 1 - numbers
        parts.append((places, ahead, axis_positions(row.sequence.images, row.start, row.tokens)))
    return StepImages(*map(np.concatenate, zip(*parts, strict=True)))


def feature_shape(checkpoint: GenerativeCheckpoint, reader: ImageReader) -> Any:
    """Returns the shape and dtype of the features of the smallest image, [tokens, features]."""
    return _traced_features(checkpoint, reader)[1]


def tower_parameters(checkpoint: GenerativeCheckpoint, reader: ImageReader) -> set[str]:
    """Returns the paths of the parameters by which the features of images are computed."""
    jaxpr = _traced_features(checkpoint, reader)[0].jaxpr
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.parameters)
    return {path_name(path) for (path, _), used in zip(leaves, is_used, strict=False) if used}


def _traced_features(checkpoint: GenerativeCheckpoint, reader: ImageReader) -> Any:
    """Traces the features of the smallest image as a function of the parameters; returns the jaxpr and the shapes."""
    pixels = jax.ShapeDtypeStruct((1, *reader.shape(reader.sizes[0])), np.uint8)
    grids = (jax.ShapeDtypeStruct((1, 1, 2), np.int32),) if reader.has_grids else ()

    def features(params: Any, pixels: Any, *grids: Any) -> Any:
        model: Any = checkpoint.model(params)
        return model.image_features(pixels, *grids)[0]

    return jax.make_jaxpr(features, return_shape=True)(checkpoint.parameters, pixels, *grids)
