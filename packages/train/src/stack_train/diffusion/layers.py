"""What denoisers share: patches, positions, waves of time, norms that are modulated, attention without a mask."""

import math
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes, constrain
from stack_train.diffusion.denoiser import Images

__all__ = [
    "ATTENTION",
    "HEADS",
    "TOKENS",
    "Heads",
    "Tokens",
    "grid_positions",
    "line_positions",
    "modulated",
    "patches_of",
    "rotated",
    "split_heads",
    "unmasked_attention",
    "unpatched",
    "waves",
]

Tokens = Float[Array, "batch seq embed"]
Heads = Float[Array, "batch seq heads head_dim"]
TOKENS: Final[LogicalAxes] = ("batch", "seq", None)
HEADS: Final[LogicalAxes] = ("batch", "seq", "act_heads", None)
_ROPE: Final[dict[str, LogicalAxes]] = {"x": HEADS, "positions": ("batch", "seq")}
ATTENTION: Final[dict[str, LogicalAxes]] = {"query": HEADS, "key": HEADS, "value": HEADS}
"""The logical axes of the operands of `ops.attention`; `TOKENS` and `HEADS` are those of activations."""


def patches_of(images: Images, patch: int) -> Float[Array, "batch seq features"]:
    """Cuts images into squares of `patch` pixels, row by row; features are ordered [channels, patch, patch]."""
    batch, height, width, channels = images.shape
    cut = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(batch, -1, channels * patch**2)


def unpatched(
    tokens: Float[Array, "batch seq features"], patch: int, height: int, width: int, *, channels_last: bool
) -> Images:
    """Joins squares to images; features are ordered [channels, patch, patch] or [patch, patch, channels]."""
    batch, rows, columns = tokens.shape[0], height // patch, width // patch
    if channels_last:
        squares = tokens.reshape(batch, rows, columns, patch, patch, -1)
    else:
        squares = tokens.reshape(batch, rows, columns, -1, patch, patch).transpose(0, 1, 2, 4, 5, 3)
    return squares.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, -1)


def waves(timesteps: Float[Array, " batch"], features: int, *, last: int = 1) -> Float[Array, "batch features"]:
    """Cosines, then sines, of t / 10000^(i / (features / 2 - last)), in float32."""
    half = features // 2
    angles = timesteps[:, None] * jnp.exp(-math.log(10_000.0) / (half - last) * jnp.arange(half, dtype=jnp.float32))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def line_positions(places: Float[np.ndarray, " places"], features: int) -> Float[np.ndarray, "places features"]:
    """Computes sines, then cosines, of p / 10000^(i / (features / 2)) for each place p."""
    angles = places[:, None] / 10_000 ** (np.arange(features // 2) / (features / 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def grid_positions(rows: int, columns: int, embed: int) -> Float[np.ndarray, "seq embed"]:
    """Computes sines and cosines of the column, then of the row, of each place of a grid; as in DiT."""
    across, down = (line_positions(np.arange(float(count)), embed // 2) for count in (columns, rows))
    return np.concatenate([np.tile(across, (rows, 1)), down.repeat(columns, axis=0)], axis=1)


def modulated(
    x: Tokens, shift: Float[Array, "batch embed"], scale: Float[Array, "batch embed"], *, epsilon: float = 1e-6
) -> Tokens:
    """norm(x) (1 + scale) + shift, by a layer norm without parameters."""
    normed: Any = ops.norm(x, kind="layer", epsilon=epsilon, axes={"x": TOKENS})
    return normed * (1 + scale[:, None]) + shift[:, None]


def split_heads(x: Tokens, heads: int, name: str) -> Heads:
    """Cuts features into heads, which `tensor` shares."""
    return constrain(x.reshape(*x.shape[:2], heads, -1), *HEADS, name=name)


def rotated(x: Heads, places: Int[Array, "batch seq axes"], axes: tuple[int, ...]) -> Heads:
    """Applies rotary embeddings; each axis of the positions rotates its own part of the features."""
    # Feature index at which each axis but the first starts.
    starts = [sum(axes[:number]) for number in range(1, len(axes))]
    parts = [
        ops.rope(part, places[..., number], theta=10_000.0, interleaved=True, axes=_ROPE)
        for number, part in enumerate(jnp.split(x, starts, axis=-1))
    ]
    return jnp.concatenate(parts, axis=-1)


def unmasked_attention(
    query: Heads,
    key: Float[Array, "batch kv_seq heads head_dim"],
    value: Float[Array, "batch kv_seq heads head_dim"],
) -> Tokens:
    """Every query attends to every key, head by head."""
    attended: Any = ops.attention(query, key, value, axes=ATTENTION)
    return attended.reshape(*query.shape[:2], -1)
