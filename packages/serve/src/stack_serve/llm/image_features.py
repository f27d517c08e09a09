"""The pool of image features on the devices, and the inputs of the programs that write and read it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import PromptImage
from stack_core.abi.models import ImageTokens
from stack_core.text.images import ImageReader
from stack_serve.llm.compiled_programs import CompiledPrograms, Key
from stack_serve.llm.images import FeatureRows, StepImages, count_feature_rows, feature_shape
from stack_serve.llm.placement import Placement

__all__ = ["ImageFeatures"]


class ImageFeatures:
    """Features of recent images.

    Attributes:
      rows: rows of the pool that each image has.
      pool: features [rows, features] as device array.

    Args:
      checkpoint: model of images.
      reader: preprocessing of its images.
      placement: placement of the arrays.
      step_tokens: maximum number of tokens per step.
    """

    def __init__(
        self, checkpoint: GenerativeCheckpoint, reader: ImageReader, placement: Placement, step_tokens: int
    ) -> None:
        self._reader, self._placement = reader, placement
        self._shape = feature_shape(checkpoint, reader)
        self.rows = FeatureRows(count_feature_rows(reader, step_tokens))
        self.allocate()

    def allocate(self) -> None:
        """Creates an empty pool."""
        self.rows.clear()
        sizes = (self.rows.capacity, self._shape.shape[1])
        self.pool: Any = self._placement.replicated(np.zeros(sizes, self._shape.dtype))

    def keys(self, prompts: Sequence[int]) -> list[Key]:
        """Returns the keys of the programs that encode an image, and of steps of each size in `prompts`."""
        sizes: Mapping[str, Sequence[int]] = {"encode": self._reader.sizes, "see": prompts}
        return [(kind, size) for kind, each in sizes.items() for size in each]

    def encode(self, images: Iterable[PromptImage], weights: Any, programs: CompiledPrograms) -> None:
        """Launches the computation of the missing features of a step's images."""
        for image in self.rows.assign(images):
            size = next(size for size in self._reader.sizes if size >= image.tokens)
            pixels = np.zeros(self._reader.shape(size), np.uint8)
            pixels[: len(image.pixels)] = image.pixels
            rows = np.full(size, self.rows.capacity, np.int32)
            rows[: image.tokens] = self.rows[image]
            grid = () if image.grid is None else (np.asarray(image.grid, np.int32),)
            self.pool = programs["encode", size](weights, self.pool, rows, pixels, *grid)

    def encode_shapes(self, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the rows, pixels and grid of an image of up to `tokens` tokens."""
        grid = (jax.ShapeDtypeStruct((2,), np.int32),) if self._reader.has_grids else ()
        pixels = jax.ShapeDtypeStruct(self._reader.shape(tokens), np.uint8)
        return (jax.ShapeDtypeStruct((tokens,), np.int32), pixels, *grid)

    def step_inputs(self, images: StepImages, size: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """Returns the inputs of a step of `size` tokens: the pool, and the arrays of `step_shapes`."""
        tokens = len(images.rows)
        rows, more = np.full(size, -1, np.int32), np.zeros((size, *self._more_shape), np.int32)
        rows[:tokens] = images.rows
        if self._field is not None:
            more[:tokens] = getattr(images, self._field)
        return self.pool, rows, more

    def step_shapes(self, tokens: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes of each token's row of the pool, and of its positions or the number of tokens ahead."""
        more = jax.ShapeDtypeStruct((tokens, *self._more_shape), np.int32)
        return jax.ShapeDtypeStruct((tokens,), np.int32), more

    def image_tokens(self, pool: Any, rows: Any, more: Any) -> ImageTokens:
        """Returns the image tokens of a step from its inputs."""
        return ImageTokens(pool, rows[:, None], **({} if self._field is None else {self._field: more[:, None]}))

    @property
    def _field(self) -> str | None:
        """Field of `ImageTokens` that tokens need in addition to their features."""
        return {"whole": "ahead", "axes": "positions"}.get(self._reader.layout)

    @property
    def _more_shape(self) -> tuple[int, ...]:
        return (3,) if self._field == "positions" else ()
