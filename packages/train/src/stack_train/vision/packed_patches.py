"""Layers of towers that take packed patches of several images: their embedding, and attention within each image."""

from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from stack_core import ops
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import LogicalAxes, constrain
from stack_core.chips import target_platform
from stack_train.nn.axial_rope import rotate_axes
from stack_train.nn.linear import FloatName
from stack_train.vision.grids import PatchPlaces

__all__ = [
    "PATCHES",
    "Patches",
    "attend_patches",
    "check_color",
    "check_heads",
    "embed_patches",
    "gather_table",
    "join_heads",
    "project_patches",
    "split_heads",
]

Patches = Float[Array, "batch patches embed"]

PATCHES: Final[LogicalAxes] = ("batch", None, None)
"""Logical axes of patches, which are not split over devices: rows are the batch; sequence parallelism is for text."""

_HEADS: Final[LogicalAxes] = ("batch", None, "act_heads", None)
_ATTENTION: Final = {"query": _HEADS, "key": _HEADS, "value": _HEADS}


def check_heads(embed: int, heads: int) -> None:
    """Raises a ConfigError if four times the number of heads does not divide the width."""
    if embed % (4 * heads):
        raise ConfigError(
            f"embed={embed} is not a multiple of 4 heads={4 * heads}: rotary positions turn pairs of features by rows "
            "and by columns. Change one of them."
        )


def check_color(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Raises a ConfigError if there is not one mean and one divisor per channel."""
    if not len(mean) == len(std) == channels:
        raise ConfigError(
            f"mean={list(mean)} and std={list(std)} need channels={channels} values. Give both that many, or change "
            "channels."
        )


def embed_patches(
    pixels: UInt8[Array, "batch patches values"],
    kernel: Float[Array, "d_in embed"],
    bias: Float[Array, " embed"] | None,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    frames: int = 1,
    dtype: FloatName,
) -> Patches:
    """Returns x kernel + bias in `dtype`, where x is (pixels / 255 - mean) / std, repeated for each frame.

    Args:
      pixels: patches, whose values are ordered [channels, patch, patch].
      kernel, bias: parameters; rows of the kernel are ordered [channels, frames, patch, patch].
      mean, std: constants of each channel.
      frames: number of equal frames of a patch.
      dtype: dtype of the product.
    """
    repeats = pixels.shape[-1] // len(mean)
    shift, scale = (np.repeat(np.asarray(each, np.float32), repeats) for each in (mean, std))
    x = ((pixels.astype(jnp.float32) / 255 - shift) / scale).astype(dtype)
    x = x.reshape(*x.shape[:2], len(mean), 1, -1)
    x = jnp.broadcast_to(x, (*x.shape[:3], frames, x.shape[-1])).reshape(*x.shape[:2], -1)
    return project_patches(x, kernel, bias)


def project_patches(
    x: Float[Array, "batch patches d_in"], kernel: Float[Array, "d_in embed"], bias: Float[Array, " embed"] | None
) -> Patches:
    """Returns x kernel + bias in the dtype of x; each device projects its own rows.

    Without these constraints, XLA may gather the patches of all rows, because the kernel is split over the same devices
    and each of them could compute a part of the features.
    """
    x = constrain(x, *PATCHES, name="patches")
    kernel, bias = gather_table(kernel.astype(x.dtype)), None if bias is None else bias.astype(x.dtype)
    embedded = ops.linear(x, kernel, bias=bias, axes={"x": PATCHES, "weight": (None, "act_embed")})
    return constrain(embedded, *PATCHES, name="embedded patches")


def gather_table(table: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
    """Gathers a small table, whose split features would otherwise split the features of the patches."""
    return constrain(table, *[None] * table.ndim, name="table of the tower")


def split_heads(x: Patches, heads: int, axis: str = "act_heads") -> Float[Array, "batch patches heads head_dim"]:
    """Splits a projection of patches into the heads of attention, whose logical axis is `axis`."""
    x = _keep_apart(x)
    return constrain(x.reshape(*x.shape[:2], heads, -1), "batch", None, axis, None, name="heads of patches")


def join_heads(attended: Float[Array, "batch patches heads head_dim"]) -> Patches:
    """Joins the heads of attention for its output projection."""
    return _keep_apart(attended.reshape(*attended.shape[:2], -1))


def _keep_apart(x: Patches) -> Patches:
    """Keeps the transposition of heads out of the products of their projections, forward and backward, on GPUs.

    XLA (jax 0.10.2) fuses it into the product, and fails if no tile of the joined features is a tile of a head, such as
    16 heads of 72 features: "Couldn't find output tile sizes".
    """
    return lax.optimization_barrier(x) if target_platform() == "gpu" else x


def attend_patches(
    query: Patches, key: Patches, value: Patches, *, places: PatchPlaces, heads: int, frequencies: Any
) -> Patches:
    """Computes attention between the patches of each image, with rotary positions by row and column.

    Args:
      query, key, value: projections of the patches.
      places: places of the patches.
      heads: number of heads.
      frequencies: [head_dim / 2] in radians per row for the first half, and per column for the second.
    """
    axis_of_pair = np.repeat([0, 1], len(frequencies) // 2)
    segments = ops.PackedSegments.of(places.segments)
    query, key = (rotate_axes(split_heads(x, heads), places.places, axis_of_pair, frequencies) for x in (query, key))
    attended: Any = ops.attention(query, key, split_heads(value, heads), segment_ids=segments, axes=_ATTENTION)
    return join_heads(attended)
