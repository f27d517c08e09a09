"""Images of prompts in engines: their validation, and the positions of a prompt's tokens."""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import GenerationRequest, PromptImage
from stack_core.text.images import ImageReader

__all__ = ["axis_positions", "check_images", "position_shift"]


def check_images(request: GenerationRequest, reader: ImageReader | None) -> None:
    """Checks the places and pixels of a request's images.

    Raises:
      GenerationError: the model reads text only, or an image does not fit the prompt or the model's reader.
    """
    if not request.images:
        return
    if reader is None:
        raise GenerationError("The model reads text only. Leave the images out.", parameter="images")
    # The last token of a prompt is computed like a generated one.
    begin, end = 0, len(request.prompt) - 1
    for number, image in enumerate(request.images):
        if problem := _image_problem(reader, image, begin, end):
            raise GenerationError(f"Image {number + 1} of {len(request.images)} {problem}", parameter="images")
        begin = image.end


def _image_problem(reader: ImageReader, image: PromptImage, begin: int, end: int) -> str | None:
    """Returns the problem of an image, whose tokens are expected between two places of the prompt."""
    if problem := _grid_problem(reader, image):
        return problem
    expected = reader.sizes[-1] if image.grid is None else math.prod(image.grid)
    if image.tokens != expected or image.start < begin or image.end > end:
        return (
            f"has tokens {image.start} to {image.end}; expected {expected} tokens in {begin} to "
            f"{end}, after the previous image and before the last token. Correct its place."
        )
    shape, dtype = getattr(image.pixels, "shape", None), getattr(image.pixels, "dtype", None)
    if shape != reader.shape(expected) or dtype != np.uint8:
        return (
            f"has pixels of dtype {dtype} and shape {shape}; expected uint8 and {reader.shape(expected)}, as "
            "ImageReader.read returns them."
        )
    return None


def _grid_problem(reader: ImageReader, image: PromptImage) -> str | None:
    if reader.has_grids and image.grid is None:
        return "has no grid. Give the rows and columns of its tokens, as ImageReader.read returns them."
    if image.grid is not None and not reader.has_grids:
        return f"has grid={image.grid}; images of this model have one size. Leave the grid out."
    if image.layout != reader.layout:
        return f"has layout={image.layout!r}; expected {reader.layout!r}. Place it with place_images."
    most = reader.sizes[-1]
    if image.grid is not None and not (min(image.grid) > 0 and math.prod(image.grid) <= most):
        return f"has grid={image.grid}; expected 1 to {most} tokens. Read it with the model's ImageReader."
    return None


def axis_positions(images: Iterable[PromptImage], start: int, tokens: int) -> Int32[np.ndarray, "tokens 3"]:
    """Returns the positions of the tokens from place `start` on, in three directions; see `PromptImage.grid`."""
    places = np.arange(start, start + tokens)
    found = np.repeat(places[:, None], 3, axis=1)
    for image in images:
        if image.grid is not None and image.layout == "axes":
            offset = places - image.start
            inside = (offset >= 0) & (offset < image.tokens)
            row, column = np.divmod(offset[inside], image.grid[1])
            # The positions of an image begin at the position of its first token.
            found[inside] += np.stack([0 * row, row, column], axis=1) - offset[inside, None]
            found[offset >= image.tokens] -= image.tokens - max(image.grid)
    return found.astype(np.int32)


def position_shift(images: Iterable[PromptImage], place: int) -> int:
    """Returns the difference between a place outside of images and the position of its token."""
    earlier = [image for image in images if image.start < place and image.layout == "axes"]
    return sum(image.tokens - max(image.grid) for image in earlier if image.grid)
