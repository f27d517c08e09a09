"""Places of patches and tokens of images whose sizes differ, packed one after another.

The grid of an image has its rows and columns of tokens. A token merges a square of `merge` x `merge` patches, which are
adjacent in the order of patches.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.models import ImageTokens

__all__ = ["PatchPlaces", "feature_rows", "patch_places", "place_packed_features", "resample", "windows"]

Grids = Int[Array, "batch images 2"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PatchPlaces:
    """Places of packed patches, int32 arrays.

    Attributes:
      segments: [batch, patches], number of the patch's image from 1, 0 for padding at the end.
      places: [batch, patches, 2], row and column of the patch in its image.
      sizes: [batch, patches, 2], rows and columns of patches of its image.
    """

    segments: Any
    places: Any
    sizes: Any


def patch_places(grids: Grids, patches: int, merge: int) -> PatchPlaces:
    """Returns the places of `patches` packed patches.

    Args:
      grids: rows and columns of tokens of each image; 0 for images that a row lacks.
    """
    number = jnp.broadcast_to(jnp.arange(patches), (len(grids), patches))
    image, offset, size = _images_of(number // merge**2, grids)
    inside = number % merge**2
    row, column = offset // size[..., 1], offset % size[..., 1]
    places = jnp.stack([row * merge + inside // merge, column * merge + inside % merge], axis=-1)
    is_real = image < grids.shape[1]
    segments = jnp.where(is_real, image + 1, 0)
    return PatchPlaces(segments, jnp.where(is_real[..., None], places, 0), size * merge)


def windows(grids: Grids, tokens: int, side: int) -> tuple[Int[Array, "batch tokens"], Int[Array, "batch tokens"]]:
    """Divides images into square windows, whose tokens become adjacent.

    Windows begin at the first row and column of an image, and may be smaller at its end. The tokens of an image stay
    together.

    Args:
      grids: rows and columns of tokens of each image; 0 for images that a row lacks.
      tokens: number of packed tokens.
      side: side of a window in tokens.

    Returns:
      The order of the tokens, and the number of each ordered token's window, from 1; 0 for padding at the end.
    """
    number = jnp.broadcast_to(jnp.arange(tokens), (len(grids), tokens))
    image, offset, size = _images_of(number, grids)
    counts = -(-grids // side)
    ends = jnp.cumsum(counts[..., 0] * counts[..., 1], axis=1)
    known = jnp.minimum(image, grids.shape[1] - 1)
    first, across = (jnp.take_along_axis(x, known, axis=1) for x in (jnp.pad(ends, ((0, 0), (1, 0))), counts[..., 1]))
    row, column = offset // size[..., 1] // side, offset % size[..., 1] // side
    window = jnp.where(image < grids.shape[1], first + row * across + column, ends[:, -1:])
    order = jnp.argsort(window, axis=1, stable=True)
    window = jnp.take_along_axis(window, order, axis=1)
    return order, jnp.where(window < ends[:, -1:], window + 1, 0)


def _images_of(number: Int[Array, "batch places"], grids: Grids) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the image of each packed token, its place in the image, and the image's grid.

    Tokens after the last image have the number of images, an arbitrary place, and a grid of at least 1 x 1.
    """
    counts = grids[..., 0] * grids[..., 1]
    ends = jnp.cumsum(counts, axis=1)
    image = jnp.sum(number[..., None] >= ends[:, None], axis=-1, dtype=jnp.int32)
    known = jnp.minimum(image, grids.shape[1] - 1)
    starts = jnp.take_along_axis(ends - counts, known, axis=1)
    size = jnp.take_along_axis(grids, known[..., None], axis=1)
    return image, number - starts, jnp.maximum(size, 1)


def resample(table: Float[Array, "rows columns embed"], places: PatchPlaces) -> Float[Array, "batch patches embed"]:
    """Interpolates a table of learned positions bilinearly to the grid of each patch's image, in fp32.

    The corners of the table are the corners of the image.
    """
    side = table.shape[0]
    table = table.astype(jnp.float32)  # before the lookup, so that gradients of an entry are summed in fp32
    steps = jnp.maximum(places.sizes - 1, 1).astype(jnp.float32)
    wanted = places.places.astype(jnp.float32) * (side - 1) / steps
    floor = jnp.floor(wanted)
    share, low = wanted - floor, floor.astype(jnp.int32)
    high = jnp.minimum(low + 1, side - 1)
    found: Any = 0.0
    for row, of_row in ((low[..., 0], 1 - share[..., 0]), (high[..., 0], share[..., 0])):
        for column, of_column in ((low[..., 1], 1 - share[..., 1]), (high[..., 1], share[..., 1])):
            found += table[row, column] * (of_row * of_column)[..., None]
    return found


def feature_rows(tokens: Int[Array, "batch seq"], grids: Grids, image_token: int) -> Int[Array, "batch seq"]:
    """Returns the index of each image token among the tokens of its row's images; -1 for text and further tokens."""
    is_image = tokens == image_token
    number = jnp.cumsum(is_image, axis=1, dtype=jnp.int32) - 1
    known = jnp.sum(grids[..., 0] * grids[..., 1], axis=1, keepdims=True)
    return jnp.where(is_image & (number < known), number, -1)


def place_packed_features(
    features: Float[Array, "batch n embed"],
    tokens: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"],
    grids: Grids,
    image_token: int,
) -> ImageTokens:
    """Assigns the packed features of each row's images, in order, to the row's image tokens.

    A token of text has its position p on all three axes. The tokens of an image have (p, p + row, p + column), where p
    is the position of its first token, and the next token has the position p + max(rows, columns). Image tokens after
    the last image keep their embeddings, and are counted like text.

    Args:
      features: features of the images of each row.
      tokens: token ids.
      positions: places of the tokens in their documents, from 0.
      grids: rows and columns of tokens of each image.
      image_token: id of the image token.
    """
    is_image = tokens == image_token
    number = jnp.cumsum(is_image, axis=1, dtype=jnp.int32) - 1
    image, offset, size = _images_of(number, grids)
    is_known = is_image & (image < grids.shape[1])
    # After an image, positions fall behind places. The sum starts anew with each document, whose first token is known
    # by its position.
    is_last = is_known & (offset == size[..., 0] * size[..., 1] - 1)
    shrink = jnp.where(is_last, size[..., 0] * size[..., 1] - jnp.max(size, axis=-1), 0)
    before = jnp.cumsum(shrink, axis=1) - shrink
    first = jnp.maximum(jnp.arange(tokens.shape[1]) - positions, 0)
    time = positions - before + jnp.take_along_axis(before, first, axis=1)
    time = jnp.where(is_known, time - offset, time)
    steps = [jnp.zeros_like(offset), offset // size[..., 1], offset % size[..., 1]]
    coordinates = time[..., None] + jnp.where(is_known[..., None], jnp.stack(steps, axis=-1), 0)
    return ImageTokens(features, jnp.where(is_known, number, -1), None, coordinates.astype(jnp.int32))
