"""Images of a batch of prompts for the engine `static`, which encodes equal images once."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from stack_core.abi.generation import GenerationRequest
from stack_core.abi.models import ImageTokens
from stack_core.text.image_prompts import axis_positions, position_shift
from stack_core.text.images import ImageReader, image_places

__all__ = ["image_inputs", "image_tokens_of"]


def image_inputs(
    reader: ImageReader, requests: Mapping[int, GenerationRequest], *, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Returns the arrays of the images of prompts.

    Images are padded to the size of the largest, and their number to a power of two, because each shape compiles
    another program.

    Args:
      reader: preprocessing of the model's images.
      requests: request of each row with images.
      shape: numbers of rows and of tokens per row.

    Returns:
      A dict with
        pixels: uint8[images, ...], the distinct images.
        grids: int32[images, 1, 2], rows and columns of their tokens; only if images have a grid.
        rows: int32[rows, tokens], index of each token's features; -1 for text.
        ahead: int32[rows, tokens], see `ImageTokens`; only if tokens attend to the rest of their image.
        positions: int32[rows, tokens, 3], see `ImageTokens`; only if positions have several axes.
        shift: int32[rows], difference between the place and the position of the tokens after the prompt.
    """
    distinct = {image.digest: image for request in requests.values() for image in request.images}
    number_of = {digest: number for number, digest in enumerate(distinct)}
    size = next(size for size in reader.sizes if size >= max(image.tokens for image in distinct.values()))
    count = 1 << (len(distinct) - 1).bit_length()
    found = {
        "pixels": np.zeros((count, *reader.shape(size)), np.uint8),
        "rows": np.full(shape, -1, np.int32),
        "shift": np.zeros(shape[0], np.int32),
        **({"grids": np.zeros((count, 1, 2), np.int32)} if reader.has_grids else {}),
        **({"ahead": np.zeros(shape, np.int32)} if reader.layout == "whole" else {}),
    }
    if reader.layout == "axes":
        found["positions"] = np.tile(axis_positions((), 0, shape[1]), (shape[0], 1, 1))
    for digest, image in distinct.items():
        found["pixels"][number_of[digest], : len(image.pixels)] = image.pixels
        if image.grid is not None:
            found["grids"][number_of[digest], 0] = image.grid
    for row, request in requests.items():
        for image in request.images:
            inside, numbers = image_places(image), np.arange(image.tokens)
            found["rows"][row, inside] = number_of[image.digest] * size + numbers
            if "ahead" in found:
                found["ahead"][row, inside] = image.tokens - 1 - numbers
        if "positions" in found:
            found["positions"][row] = axis_positions(request.images, 0, shape[1])
        found["shift"][row] = position_shift(request.images, len(request.prompt))
    return found


def image_tokens_of(model: Any, images: Mapping[str, jax.Array]) -> ImageTokens:
    """Computes the features of the arrays of `image_inputs`."""
    grids = (images["grids"],) if "grids" in images else ()
    features = model.image_features(images["pixels"], *grids)
    flat = features.reshape(-1, features.shape[-1])
    return ImageTokens(flat, images["rows"], images.get("ahead"), images.get("positions"))
