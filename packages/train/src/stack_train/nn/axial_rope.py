"""Rotary positions with several axes, such as the time, row and column of a token in an image."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ConfigError
from stack_core.ops.definitions.rope import rotated
from stack_core.ops.references.rope_scaling import unscaled_frequencies
from stack_train.nn.attention import Rope

__all__ = ["AxialRope", "InterleavedRope", "SectionedRope", "rotate_axes"]


def rotate_axes(
    x: Float[Array, "batch seq heads head_dim"],
    coordinates: Int[Array, "batch seq axes"],
    axis_of_pair: np.ndarray,
    frequencies: Any,
    factor: float = 1.0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates pairs of features by angles proportional to one of several coordinates.

        y_i = x_i cos(p_i f_i) - x_j sin(p_i f_i)
        y_j = x_j cos(p_i f_i) + x_i sin(p_i f_i)            j = i + head_dim / 2, p_i = coordinates[axis_of_pair[i]]

    Angles and rotation are computed in fp32.

    Args:
      x: queries or keys.
      coordinates: position of each token on each axis.
      axis_of_pair: int[head_dim / 2], axis whose coordinate rotates each pair.
      frequencies: f, [head_dim / 2] or broadcastable to [batch, seq, heads, head_dim / 2], in radians per position.
      factor: factor of cosine and sine.
    """
    angles = coordinates[..., None, axis_of_pair].astype(jnp.float32) * frequencies
    return rotated(x, factor * jnp.cos(angles), factor * jnp.sin(angles), interleaved=False)


@dataclass(frozen=True, kw_only=True)
class AxialRope(Rope):
    """Base class of rotary positions of three axes: time, row and column.

    Tokens of text have three equal coordinates, and are rotated as by `Rope`.

    Attributes:
      sections: numbers of pairs of time, row and column.
    """

    sections: tuple[int, int, int]

    def __post_init__(self) -> None:
        if self.interleaved or self.rotary_dim is not None:
            raise ConfigError("Rotary positions of three axes rotate the two halves of whole heads.")

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq *axes"], heads: str | None
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Rotates queries or keys by one position per token, or by its three coordinates."""
        if positions.ndim == 2:
            return super().__call__(x, positions, heads)
        head_dim = x.shape[-1]
        if self.scaling is None:
            return rotate_axes(x, positions, self.axis_of_pair, unscaled_frequencies(self.theta, head_dim))
        scaled, factor = self.scaling.frequencies(self.theta, head_dim, jnp.max(positions, axis=-1))
        return rotate_axes(x, positions, self.axis_of_pair, scaled, factor)

    @property
    @abstractmethod
    def axis_of_pair(self) -> np.ndarray:
        """Axis of each pair, int[sum(sections)]."""


class SectionedRope(AxialRope):
    """Rotary positions whose first pairs belong to time, the next to the row, and the last to the column.

    Source: Qwen Team, Qwen2-VL, 2024 (arXiv:2409.12191), section 2.1.
    """

    @property
    def axis_of_pair(self) -> np.ndarray:
        return np.repeat([0, 1, 2], self.sections)


class InterleavedRope(AxialRope):
    """Rotary positions whose frequencies alternate between the axes: time, row, column, time, row, column, ...

    Pair i belongs to the row if i % 3 == 1 and i < 3 `sections[1]`, to the column if i % 3 == 2 and
    i < 3 `sections[2]`, and otherwise to time.

    Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.1.
    """

    @property
    def axis_of_pair(self) -> np.ndarray:
        pair = np.arange(sum(self.sections))
        axis = pair % 3
        return np.where(pair < 3 * np.asarray(self.sections)[axis], axis, 0)
