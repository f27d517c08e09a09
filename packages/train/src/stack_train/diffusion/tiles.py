"""Decoding of latents in overlapping tiles, whose memory does not grow with the image.

It computes what `tiled_decode` of diffusers' `AutoencoderKL` does: tiles overlap by a quarter, and in the overlap the
weight of the next tile grows linearly from 0. Norms and attention see only their tile, so the image changes slightly.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.denoiser import Images

__all__ = ["check_tile", "decode_in_tiles"]

_OVERLAP = 4
"""The inverse of the fraction by which tiles overlap."""


def check_tile(pixels: int, factor: int) -> None:
    """Raises a ConfigError unless a quarter of a tile is a multiple of a latent; gives the nearest sizes.

    Args:
      pixels: side of a tile.
      factor: pixels of a side for each side of a latent.
    """
    unit = _OVERLAP * factor
    if pixels < unit or pixels % unit:
        nearest = dict.fromkeys(max(pixels // unit + more, 1) * unit for more in (0, 1))
        raise ConfigError(
            f"The tile has {pixels} pixels; the sides of tiles of this model are multiples of {unit} pixels. Take "
            f"{' or '.join(map(str, nearest))}."
        )


def decode_in_tiles(
    decode: Callable[[Any], jax.Array], latents: Images, *, tile_pixels: int, factor: int
) -> Float[np.ndarray, "batch image_height image_width image_channels"]:
    """Decodes image by image and tile by tile, and blends the tiles in the memory of the host.

    Args:
      decode: decoder, compiled once for each shape: inner tiles, and the narrower tiles at the right and at the bottom.
      tile_pixels: see `check_tile`.
      factor: see `check_tile`.
    """
    side, host = tile_pixels // factor, np.asarray(latents)
    step, overlap = side - side // _OVERLAP, tile_pixels // _OVERLAP
    count, rows, columns, _ = host.shape
    images: np.ndarray | None = None
    for number in range(count):
        above: list[np.ndarray] = []
        for top in range(0, rows, step):
            row: list[np.ndarray] = []
            for place, left in enumerate(range(0, columns, step)):
                part = host[number : number + 1, top : top + side, left : left + side]
                tile = np.array(decode(part)[0], np.float32)
                if above:
                    _blend(above[place], tile, overlap)
                if row:
                    _blend(row[-1].swapaxes(0, 1), tile.swapaxes(0, 1), overlap)
                row.append(tile)
                if images is None:
                    images = np.empty((count, rows * factor, columns * factor, tile.shape[-1]), np.float32)
                # The next tiles overwrite the rest, which they overlap.
                y, x = top * factor, left * factor
                images[number, y : y + len(tile), x : x + tile.shape[1]] = tile
            above = row
    assert images is not None  # an image has a tile
    return images


def _blend(before: np.ndarray, tile: np.ndarray, overlap: int) -> None:
    """Blends the last rows of a tile into the first rows of the next tile, in place."""
    overlap = min(overlap, len(before), len(tile))
    share = (np.arange(overlap, dtype=np.float32) / overlap)[:, None, None]
    tile[:overlap] = before[len(before) - overlap :] * (1.0 - share) + tile[:overlap] * share
