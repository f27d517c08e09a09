"""Scaling of rotary frequencies for contexts longer than in pretraining, as defined by transformers.

Field names match a Hugging Face `rope_scaling` mapping. With r = rotary_dim, the unscaled frequencies are
f_i = theta^(-2i / r), i = 0 ... r/2 - 1, in radians per position.
"""

import math
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.config import config

__all__ = [
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ProportionalScaling",
    "RopeScaling",
    "RopeScalingMethod",
    "YarnScaling",
    "unscaled_frequencies",
]

Frequencies: TypeAlias = tuple[Any, float]


@runtime_checkable
class RopeScalingMethod(Protocol):
    """Protocol of the `scaling` argument of `rope`; any hashable class with this method can be used."""

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        """Returns (frequencies in fp32, factor on cosine and sine).

        Args:
          positions: int[..., seq].

        Returns:
          frequencies[rotary_dim / 2], or [..., 1, 1, rotary_dim / 2] if they differ between rows.
        """
        ...


def unscaled_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """Returns `theta ** -(2 i / rotary_dim)`, float32[rotary_dim // 2], in radians per position."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


@config
class LinearScaling:
    """Linear scaling, f_i / factor: compresses positions into the pretrained range.

    Attributes:
      factor: ratio of the extended to the pretrained context length.
      rope_type: discriminator of the config, always "linear".
    """

    factor: float
    rope_type: Literal["linear"] = "linear"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        return unscaled_frequencies(theta, rotary_dim) / np.float32(self.factor), 1.0


@config
class DynamicScaling:
    """Dynamic NTK scaling: theta grows with the sequence, theta (a n / n0 - (a - 1))^(r / (r - 2)).

    a is `factor`, n0 is `max_position_embeddings`, and n the largest position of the row plus one, at least n0.

    Attributes:
      factor: a, growth of theta with the sequence length.
      max_position_embeddings: n0, pretrained context length in tokens; up to it, frequencies are unscaled.
      rope_type: discriminator of the config, always "dynamic".
    """

    factor: float
    max_position_embeddings: int
    rope_type: Literal["dynamic"] = "dynamic"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        seq = jnp.maximum(_last_of_row(positions) + 1, self.max_position_embeddings).astype(jnp.float32)
        growth = self.factor * seq / self.max_position_embeddings - (self.factor - 1)
        exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
        return 1.0 / (theta * growth ** (rotary_dim / (rotary_dim - 2))) ** exponents, 1.0


@config
class Llama3Scaling:
    """Llama 3 scaling: f_i / factor for wavelengths above n0 / low, f_i below n0 / high, and a blend in between.

    n0 is `original_max_position_embeddings`; low and high are the two frequency factors; wavelengths are 2 pi / f_i.

    Attributes:
      factor: divisor of the low frequencies.
      low_freq_factor: number of turns in the pretrained context below which a frequency is divided by `factor`.
      high_freq_factor: number of turns in the pretrained context above which a frequency is unchanged.
      original_max_position_embeddings: n0, pretrained context length in tokens.
      rope_type: discriminator of the config, always "llama3".
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: Literal["llama3"] = "llama3"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        unscaled = unscaled_frequencies(theta, rotary_dim)
        turns = self.original_max_position_embeddings * unscaled / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return ((1 - blend) * unscaled / self.factor + blend * unscaled).astype(np.float32), 1.0


@config
class YarnScaling:
    """YaRN scaling: keeps high frequencies, divides low frequencies by `factor`, with a ramp in between.

    The ramp runs between the dimensions that turn `beta_fast` and `beta_slow` times in
    `original_max_position_embeddings` positions, rounded outwards if `truncate`. Cosine and sine are multiplied by
    `attention_factor`, by default m(mscale) / m(mscale_all_dim), or m(1) if either is None or 0, with
    m(k) = 0.1 k ln(factor) + 1 (1 if factor <= 1).

    Attributes:
      factor: divisor of the low frequencies.
      original_max_position_embeddings: pretrained context length in tokens.
      attention_factor: factor on cosine and sine; None derives it from `factor`, `mscale` and `mscale_all_dim`.
      beta_fast: number of turns in the pretrained context above which frequencies are unchanged.
      beta_slow: number of turns in the pretrained context below which frequencies are divided by `factor`.
      mscale: k in the numerator m(k) of the default `attention_factor`.
      mscale_all_dim: k in its denominator m(k).
      truncate: whether the ends of the ramp are rounded to whole dimensions.
      rope_type: discriminator of the config, always "yarn".

    Source: Peng et al., YaRN, 2023 (arXiv:2309.00071).
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rope_type: Literal["yarn"] = "yarn"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        unscaled = unscaled_frequencies(theta, rotary_dim)
        low = self._dimension_turning(self.beta_fast, theta, rotary_dim)
        high = self._dimension_turning(self.beta_slow, theta, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # avoids a division by 0, as in transformers
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
        return (unscaled / self.factor * ramp + unscaled * (1 - ramp)).astype(np.float32), self._attention_factor()

    def _dimension_turning(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Returns the real-valued i at which f_i makes `turns` turns in the pretrained context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    def _attention_factor(self) -> float:
        def factor_for(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return factor_for(self.mscale) / factor_for(self.mscale_all_dim)
        return factor_for(1.0)


@config
class LongRopeScaling:
    """LongRoPE: f_i / short_i, or f_i / long_i if a position of the row reaches `original_max_position_embeddings`.

    Cosine and sine are multiplied by `attention_factor`, by default
    sqrt(1 + ln(factor) / ln(original_max_position_embeddings)), or 1 if factor <= 1.

    Attributes:
      short_factor: divisor of each frequency for short sequences, rotary_dim / 2 values.
      long_factor: divisor of each frequency for long sequences, rotary_dim / 2 values.
      factor: ratio of the extended to the pretrained context length.
      original_max_position_embeddings: pretrained context length in tokens.
      attention_factor: factor on cosine and sine; None derives it from `factor` as above.
      rope_type: discriminator of the config, always "longrope".

    Source: Ding et al., LongRoPE, 2024 (arXiv:2402.13753).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    rope_type: Literal["longrope"] = "longrope"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        unscaled = unscaled_frequencies(theta, rotary_dim)
        short = unscaled / np.asarray(self.short_factor, np.float32)
        long = unscaled / np.asarray(self.long_factor, np.float32)
        is_long = _last_of_row(positions) >= self.original_max_position_embeddings
        return jnp.where(is_long, long, short), self._attention_factor()

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


@config
class ProportionalScaling:
    """Rotates the first n = floor(partial_rotary_factor r / 2) pairs by f_i / factor; the rest have frequency 0.

    Unlike a smaller `rotary_dim`, the pairs are (i, i + r/2), and f_i are the frequencies of r features.

    Source: transformers, rope type "proportional" of Gemma 4.

    Attributes:
      partial_rotary_factor: fraction of the pairs that are rotated.
      factor: divisor of the frequencies.
      rope_type: discriminator of the config, always "proportional".
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    rope_type: Literal["proportional"] = "proportional"

    def frequencies(self, theta: float, rotary_dim: int, positions: jax.Array) -> Frequencies:
        rotated = int(self.partial_rotary_factor * rotary_dim // 2)
        scaled = unscaled_frequencies(theta, rotary_dim) / np.float32(self.factor)
        return np.where(np.arange(rotary_dim // 2) < rotated, scaled, np.float32(0)), 1.0


def _last_of_row(positions: jax.Array) -> jax.Array:
    """Returns the largest position of each row, [..., 1, 1, 1]; rows are independent sequences."""
    return jnp.max(positions, axis=-1)[..., None, None, None]


RopeScaling: TypeAlias = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling
)
