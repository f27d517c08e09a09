"""Static ranges of activations, accumulated over a stream of batches.

statistics = empty_statistics(spec, x.shape)
for x in batches:
    statistics = observe(statistics, x, spec)          # pure: may run under jit and scan
codes = quantize_array(x, spec, range=observed_range(statistics))

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
    """Range statistics of the batches so far, which may have any batch and sequence sizes.

    The range of several batches depends on the calibration:

        absmax, minmax, fixed    the largest range
        rms                      the root of the mean square of all entries, times factor
        percentile, mse          the mean of the ranges of the batches
        moving,decay             their weighted mean; each batch has `decay` times the weight of the next one

    Invariant: `high`, and `low` unless it is None, have the shape of the scales.

    Attributes:
      low: float32 lower ends, or None for symmetric ranges.
      high: float32 upper ends.
      weight: float32 total weight of the batches, 0 before the first one. If several statistics are stacked along
        leading axes, it has only these axes.
    """

    low: Any  # Any, as JAX also builds this pytree from shapes and shardings
    high: Any
    weight: Any


def empty_statistics(spec: ArraySpec, shape: tuple[int, ...]) -> RangeStatistics:
    """Returns the statistics of zero batches. Axes of `shape` without channels or tiles may have any size."""
    zeros = jnp.zeros(spec.tiling(shape).scale_shape, jnp.float32)
    return RangeStatistics(None if spec.symmetric else zeros, zeros, jnp.float32(0))


def observe(statistics: RangeStatistics, array: jax.Array, spec: ArraySpec) -> RangeStatistics:
    """Returns the statistics with one more batch.

    Raises:
      ShapeError: the batch has a different number of channels or tiles.
    """
    span = calibrate(array, spec)
    if span.high.shape != statistics.high.shape:
        raise ShapeError(
            f"A batch of shape {array.shape} has ranges of shape {span.high.shape}; earlier batches have "
            f"{statistics.high.shape}. A static range needs channels and tiles along axes of fixed size only: given "
            f"channel_axes={spec.channel_axes} and tiles={spec.tile_sizes}."
        )
    name = spec.calibrated.name
    entries = np.float32(array.size if name == "rms" else 1)
    decay = np.float32(spec.calibrated.arguments[0] if name == "moving" else 1)
    weight = decay * statistics.weight + entries

    def with_new(so_far: jax.Array, new: jax.Array) -> jax.Array:
        """Combines two ends given as magnitudes."""
        if name in _LARGEST_OF_ALL:
            return jnp.maximum(so_far, new)
        if name == "rms":
            return jnp.sqrt(jnp.square(so_far) + (jnp.square(new) - jnp.square(so_far)) * (entries / weight))
        return so_far + (new - so_far) * (entries / weight)

    # As magnitudes, so the larger range is the maximum on either side.
    low = None if statistics.low is None or span.low is None else -with_new(-statistics.low, -span.low)
    return RangeStatistics(low, with_new(statistics.high, span.high), weight)


def merged(part: RangeStatistics, spec: ArraySpec, axis_names: Sequence[str]) -> RangeStatistics:
    """Merges the statistics of a batch that is sharded over mesh axes, inside of a `shard_map`.

    The "percentile" or "mse" range of the batch is approximated by the mean of the ranges of the shards.
    """
    names = tuple(axis_names)

    def of_all(each: jax.Array) -> jax.Array:
        """Combines ends given as magnitudes."""
        match spec.calibrated.name:
            case "rms":
                return jnp.sqrt(lax.pmean(jnp.square(each), names))
            case "percentile" | "mse":
                return lax.pmean(each, names)
        return lax.pmax(each, names)

    low = None if part.low is None else -of_all(-part.low)
    # Shards are equally large, so their weights are equal; the reduction makes the result replicated.
    return RangeStatistics(low, of_all(part.high), lax.pmax(part.weight, names))


def observed_range(statistics: RangeStatistics) -> Range:
    """Returns the observed range for quantization; it is NaN before the first batch, which `quantize_array` rejects."""
    seen = statistics.weight > 0
    seen = jnp.expand_dims(seen, tuple(range(seen.ndim, statistics.high.ndim)))
    low, high = jax.tree.map(lambda end: jnp.where(seen, end, jnp.nan), (statistics.low, statistics.high))
    return Range(low, high)
