"""Metrics with a rule to combine them over microbatches of a step, batches of an evaluation and steps of a log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

__all__ = ["Combination", "Metric", "Metrics", "combine", "combine_all"]

Combination = Literal["mean", "sum", "max", "min"]


@partial(jax.tree_util.register_dataclass, data_fields=["value", "weight"], meta_fields=["combination"])
@dataclass(frozen=True)
class Metric:
    """A scalar with the rule that combines several of its kind.

        mean: sum_i weight_i value_i / sum_i weight_i, or 0 if all weights are 0
        sum, max, min: of the values

    Attributes:
      value: the scalar.
      weight: the denominator of a mean, such as a number of tokens; None for other combinations.
      combination: the rule, "mean", "sum", "max" or "min".
    """

    value: Any
    weight: Any = None
    combination: Combination = field(default="mean", kw_only=True)

    @classmethod
    def mean(cls, value: Any, weight: Any = 1.0) -> "Metric":
        return cls(value, weight)

    @classmethod
    def sum(cls, value: Any) -> "Metric":
        return cls(value, combination="sum")

    @classmethod
    def max(cls, value: Any) -> "Metric":
        return cls(value, combination="max")

    @classmethod
    def min(cls, value: Any) -> "Metric":
        return cls(value, combination="min")

    def __float__(self) -> float:
        return float(self.value)


Metrics = Mapping[str, Metric]


def combine(stacked: Metric) -> Metric:
    """Combines metrics whose values and weights are stacked along a leading axis, as NumPy or JAX arrays."""
    value, weight = stacked.value, stacked.weight
    if stacked.combination != "mean":
        return Metric(getattr(value, stacked.combination)(0), combination=stacked.combination)
    total = weight.sum(0)
    shares = (total + (total == 0).astype(total.dtype)).astype(value.dtype)  # 1 instead of 0, to avoid 0 / 0
    return Metric.mean((value * weight.astype(value.dtype)).sum(0) / shares, total)


def combine_all(metrics: Sequence[Metrics]) -> dict[str, Metric]:
    """Combines the metrics of several batches, on the host and in float64.

    Args:
      metrics: metrics of each batch by name, with the same names in each; an empty sequence gives an empty dict.
    """
    if not metrics:
        return {}
    plain = jax.device_get(list(metrics))
    stacked = jax.tree.map(lambda *leaves: np.array(leaves, np.float64), *plain)
    return {name: combine(metric) for name, metric in stacked.items()}
