"""Static ranges of activations, accumulated over a stream of batches.

statistics = empty_statistics(spec, x.shape)
for x in batches:
    statistics = observe(statistics, x, spec)          # pure: may run under jit and scan
codes = quantize(x, spec, range=observed_range(statistics))

`quantize_model` does so for all activations of a model, given a `stream`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.abi.errors import ShapeError
from stack_quant.calibrate import calibrate
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec

__all__ = ["RangeStatistics", "empty_statistics", "merged", "observe", "observed_range"]

_LARGEST_OF_ALL = ("absmax", "minmax", "fixed")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RangeStatistics:
    """What batches so far spanned, whatever their batch and sequence sizes.

    By calibration: the largest of all batches for "absmax" and "minmax"; of "rms" the mean square of all entries; of
    "percentile" and "mse" the mean of the batches' ranges; of "moving,decay" their mean, in which each batch has
    `decay` times the weight of the one after it.

    Invariant: `low`, if there is one, and `high` have the shape of the scales.

    Attributes:
      low: float32, or None for symmetric ranges.
      weight: float32, how much was seen; 0 before the first batch. Of several statistics in one, along the first axes,
        it has those axes only.
    """

    low: Any  # JAX also makes trees of shapes and shardings in place of arrays.
    high: Any
    weight: Any


def empty_statistics(spec: ArraySpec, shape: tuple[int, ...]) -> RangeStatistics:
    """Those of no batch, for arrays of that shape; its axes without channels or tiles may have any size."""
    zeros = jnp.zeros(spec.tiling(shape).scale_shape, jnp.float32)
    return RangeStatistics(None if spec.symmetric else zeros, zeros, jnp.float32(0))


def observe(statistics: RangeStatistics, array: jax.Array, spec: ArraySpec) -> RangeStatistics:
    """The statistics with one more batch.

    Raises:
      ShapeError: the batch has another number of channels or tiles.
    """
    span = calibrate(array, spec)
    if span.high.shape != statistics.high.shape:
        raise ShapeError(
            f"A batch of shape {array.shape} has ranges of shape {span.high.shape}; those so far have "
            f"{statistics.high.shape}. A static range needs channels and tiles along axes of fixed size only: given "
            f"channel_axes={spec.channel_axes} and tiles={spec.tile_sizes}."
        )
    name = spec.calibrated.name
    entries = np.float32(array.size if name == "rms" else 1)
    decay = np.float32(spec.calibrated.arguments[0] if name == "moving" else 1)
    weight = decay * statistics.weight + entries

    def with_new(so_far: jax.Array, new: jax.Array) -> jax.Array:
        """Of magnitudes."""
        if name in _LARGEST_OF_ALL:
            return jnp.maximum(so_far, new)
        if name == "rms":
            return jnp.sqrt(jnp.square(so_far) + (jnp.square(new) - jnp.square(so_far)) * (entries / weight))
        return so_far + (new - so_far) * (entries / weight)

    low = None if statistics.low is None or span.low is None else -with_new(-statistics.low, -span.low)
    return RangeStatistics(low, with_new(statistics.high, span.high), weight)


def merged(part: RangeStatistics, spec: ArraySpec, axis_names: Sequence[str]) -> RangeStatistics:
    """Of a batch of which each device along some axes of the mesh observed a part: the statistics with all of it.

    A "percentile" and an "mse" range of the whole is taken to be the mean of the parts'.
    """
    names = tuple(axis_names)

    def of_all(each: jax.Array) -> jax.Array:
        """Of magnitudes."""
        match spec.calibrated.name:
            case "rms":
                return jnp.sqrt(lax.pmean(jnp.square(each), names))
            case "percentile" | "mse":
                return lax.pmean(each, names)
        return lax.pmax(each, names)

    low = None if part.low is None else -of_all(-part.low)
    return RangeStatistics(low, of_all(part.high), lax.pmax(part.weight, names))


def observed_range(statistics: RangeStatistics) -> Range:
    """The range to quantize with; NaN if no batch was seen, which `quantize` refuses."""
    seen = statistics.weight > 0
    seen = jnp.expand_dims(seen, tuple(range(seen.ndim, statistics.high.ndim)))
    low, high = jax.tree.map(lambda end: jnp.where(seen, end, jnp.nan), (statistics.low, statistics.high))
    return Range(low, high)
