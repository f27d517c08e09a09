"""Cross-validation of the choice by published timings: each model's shapes are held out in turn.

For each call that was timed with two or more implementations, the choice by the timings of other models is compared
with the fastest. The baseline is the fixed order by which Tokamax chooses.
"""

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.plugins import registries
from stack_core.chips import Chip
from stack_kernels.tuning.published import Timed, estimates
from stack_kernels.tuning.shapes import CallShape

__all__ = ["ChoiceRatios", "Distance", "distance_of", "ratios", "seconds_off", "tokamaxs_order"]

_MODEL_SIZES: Mapping[str, tuple[str, ...]] = {
    "attention": ("heads", "kv_heads", "head_dim", "value_dim"),
    "gated_linear_unit": ("d_in", "d_out"),
    "linear_cross_entropy": ("embed", "vocab"),
    "norm": ("features",),
    "ragged_dot": ("groups", "d_in", "d_out"),
}
"""Sizes that a model fixes, unlike batch and length. A gradient swaps d_in and d_out, so both are sorted."""

_ORDER = ("pallas_mosaic", "triton", "pallas_triton", "", "xla_chunked", "chunked_xla", "jax_nn")


@dataclass(frozen=True)
class ChoiceRatios:
    """Result of one held-out call: time of each choice over the time of the fastest implementation.

    Attributes:
      chip: name of the chip.
      op: name of the op.
      direction: direction of the call.
      chosen: ratio for the implementation chosen by the estimates.
      in_order: ratio for the first implementation in Tokamax's order.
      estimated: estimated time over measured time, by implementation.
    """

    chip: str
    op: str
    direction: str
    chosen: float
    in_order: float
    estimated: Mapping[str, float]


@dataclass(frozen=True)
class Distance:
    """Distance of a choice from the fastest implementation, over several calls.

    Attributes:
      calls: number of calls.
      within: share of calls in which the choice takes at most 5% longer.
      mean: mean ratio of its time to the fastest time.
      worst: largest ratio.
    """

    calls: int
    within: float
    mean: float
    worst: float


def ratios(timed: Sequence[Timed]) -> Iterator[ChoiceRatios]:
    """Yields the ratios of calls with two or more implementations, chosen from other models' timings on the chip."""
    kinds: dict[tuple[str, str, str], dict[CallShape, Mapping[str, tuple[float, Any]]]] = collections.defaultdict(dict)
    for case in timed:
        kinds[case.chip, case.shape.op, case.direction][case.shape] = case.times
    for (kind, op, direction), cases in sorted(kinds.items()):
        chip: Chip = registries.chips[kind]
        models = {shape: _model(shape) for shape in cases}
        for model in sorted({models[shape] for shape, times in cases.items() if len(times) > 1}):
            other_models = {shape: times for shape, times in cases.items() if models[shape] != model}
            for shape, times in cases.items():
                if models[shape] == model and len(times) > 1:
                    found = {
                        name: each.seconds
                        for name, each in estimates(shape, other_models, chip).items()
                        if name in times
                    }
                    yield _ratio((kind, op, direction), {name: s for name, (s, _) in times.items()}, found)


def _ratio(kind: tuple[str, str, str], times: Mapping[str, float], found: Mapping[str, float]) -> ChoiceRatios:
    fastest, first = min(times.values()), tokamaxs_order(times)
    chosen = min(found, key=lambda name: found[name]) if found else first
    off = {name: seconds / times[name] for name, seconds in found.items()}
    return ChoiceRatios(*kind, times[chosen] / fastest, times[first] / fastest, off)


def _model(shape: CallShape) -> tuple[Any, ...]:
    sizes = dict(shape.sizes)
    fixed = [sizes[name] for name in _MODEL_SIZES[shape.op]]
    return (*fixed[:-2], *sorted(fixed[-2:])) if shape.op == "ragged_dot" else tuple(fixed)


def tokamaxs_order(names: Mapping[str, Any]) -> str:
    """Returns the name that Tokamax tries first: Mosaic (on TPUs the older version first), then Triton, then XLA."""

    def place(name: str) -> tuple[int, int]:
        known = (number for number, word in enumerate(_ORDER) if word and name.startswith(word))
        return next(known, _ORDER.index("")), int("v2" in name)

    # Sorted, because versions of a kernel may share a place.
    return min(sorted(names), key=place)


def distance_of(found: Sequence[ChoiceRatios], of: Callable[[ChoiceRatios], float]) -> Distance:
    """Summarizes the distance of one kind of choice from the fastest implementation."""
    ratios = [of(each) for each in found]
    within = sum(ratio <= 1.05 for ratio in ratios) / len(ratios)
    return Distance(len(ratios), within, sum(ratios) / len(ratios), max(ratios))


def seconds_off(found: Sequence[ChoiceRatios]) -> tuple[float, float]:
    """Returns the factors by which estimated seconds are off: the median and the 90th percentile."""
    off = sorted(abs(math.log(ratio)) for each in found for ratio in each.estimated.values())
    return math.exp(off[len(off) // 2]), math.exp(off[int(0.9 * len(off))])
