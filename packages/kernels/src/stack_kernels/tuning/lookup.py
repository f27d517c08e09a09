"""Chooses from measurements, for calls that were measured and for nearby sizes.

The nearest measured sizes decide which implementations and configs are compared; their times at the sizes of the call
are interpolated from all nearby measurements. Measurements are ignored if the size ratios multiply to more than eight.

The choice of the forward pass cannot depend on whether the call will be differentiated. If gradients were measured, the
pair of forward and backward with the least time for value and gradient decides both:

    T(f, b) = G(b)           b is f, and its forward pass saves residuals for its own backward pass
    T(f, b) = F(f) + G(b)    otherwise; such a b computes its own forward pass again

F and G are the measured times of the forward pass and of the gradient; for an implementation with its own residuals, G
is the time of value and gradient. If no gradient was measured, the fastest forward pass decides.
"""

import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.abi.ops import OpCall, OpImplementation, TunedChoice
from stack_core.chips import Chip
from stack_core.ops.building import preferred
from stack_kernels.tuning.costs import estimate_s
from stack_kernels.tuning.shapes import CallShape, shape_of
from stack_kernels.tuning.tables import ChipName, Measurement, Table, decoded_config, encoded_config

__all__ = ["OneTable", "RelativeChipWarning", "TunedTables", "chip_platform", "duration", "nearest_chip"]

_FARTHEST = 3.0  # upper limit of the sum of |log2| of the size ratios
_KNOWN_CALLS = 4096


class RelativeChipWarning(UserWarning):
    """Measurements of another chip are used, for lack of measurements of this chip."""


# Keys of dicts by identity, because measurements contain mappings, which cannot be hashed.
@dataclass(frozen=True, eq=False)
class _Estimate:
    """Estimated seconds of a call with an implementation and a config, from a measurement at or near its sizes."""

    measurement: Measurement
    config: Any
    seconds: float


@dataclass(frozen=True)
class _Candidates:
    """Allowed implementations by name, and the default config of each."""

    implementations: Mapping[str, OpImplementation]
    defaults: Mapping[str, Any]


class TunedTables:
    """A `TunedTable` over the measurements in several tables, at most one per chip.

    Args:
      load: returns the tables; called when the first call is looked up.
    """

    def __init__(self, load: Callable[[], Sequence[Table]]) -> None:
        self._load = load
        self._loaded: dict[ChipName, _Measurements] | None = None
        self._told: set[ChipName] = set()

    def lookup(
        self,
        call: OpCall,
        chip: Chip,
        *,
        candidates: Mapping[str, OpImplementation],
        forward: TunedChoice | None = None,
    ) -> TunedChoice | None:
        """Chooses an implementation for one direction of a call; see `stack_core.abi.tuning.TunedTable`."""
        name = ChipName(chip.kind, chip.model)
        if self._loaded is None:
            self._loaded = {table.chip: _Measurements(table) for table in self._load()}
        near = _nearest(chip, self._loaded)
        if near is None or not candidates:
            return None
        defaults = {name: each.default and each.default(call, chip) for name, each in candidates.items()}
        choice = _chosen(self._loaded[near], call, _Candidates(candidates, defaults), forward)
        if choice is not None and near != name:
            self._say_relative(name, near)
        return choice

    def forget(self) -> None:
        """Discards the tables; the next lookup loads the files again."""
        self._loaded = None

    def _say_relative(self, name: ChipName, near: ChipName) -> None:
        if name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"Nothing was measured on {name}; ops are chosen by what was measured on {near}. "
                "`stack tune FILE.py:fn` measures here.",
                RelativeChipWarning,
                stacklevel=3,
            )


class OneTable(TunedTables):
    """A `TunedTable` of one table. Equal tables compare equal, which keeps the cache of `jax.jit` valid."""

    def __init__(self, table: Table) -> None:
        super().__init__(lambda: (table,))
        self._table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneTable) and self._table == other._table

    def __hash__(self) -> int:
        return hash(self._table)


class _Measurements:
    """A table indexed for lookups."""

    def __init__(self, table: Table) -> None:
        self._by_kind: dict[tuple[Any, ...], dict[tuple[str, ...], list[Measurement]]] = {}
        for found in table.measurements:
            kind = (found.case.shape.op, found.case.shape.traits, found.case.direction)
            self._by_kind.setdefault(kind, {}).setdefault(found.case.gradients_of, []).append(found)
        self._rankings: dict[tuple[Any, ...], tuple[_Near, ...]] = {}

    def near(self, shape: CallShape, direction: str) -> tuple["_Near", ...]:
        """Returns the measurements near a call by increasing distance; gradients of the most arguments come first."""
        key = (shape.op, shape.traits, shape.sizes, direction)
        if key not in self._rankings:
            if len(self._rankings) >= _KNOWN_CALLS:
                # All entries and not the oldest: more calls are rare, and an entry is quick to compute again.
                self._rankings.clear()
            found = self._by_kind.get((shape.op, shape.traits, direction), {})
            self._rankings[key] = tuple(
                near for names in sorted(found, key=len, reverse=True) for near in _by_distance(found[names], shape)
            )
        return self._rankings[key]


@dataclass(frozen=True)
class _Near:
    """Measurements at one shape.

    Attributes:
      measurements: the measurements.
      seconds: time of each (implementation, config) at the sizes of the call, estimated from all nearby shapes.
    """

    measurements: tuple[Measurement, ...]
    seconds: Mapping[tuple[str, str], float]


def _by_distance(found: Sequence[Measurement], shape: CallShape) -> Iterator[_Near]:
    by_bucket: dict[Any, list[Measurement]] = {}
    for measurement in found:
        if measurement.case.shape.distance(shape) <= _FARTHEST:
            by_bucket.setdefault(measurement.case.shape.bucket, []).append(measurement)
    groups = [_of_one_jax(group) for group in by_bucket.values()]
    samples: dict[tuple[str, str], list[tuple[CallShape, float]]] = {}
    for measurement in (each for group in groups for each in group if each.outcome == "measured"):
        samples.setdefault(measurement.candidate, []).append((measurement.case.shape, measurement.median_s))
    seconds = {candidate: estimate_s(of_one, shape) for candidate, of_one in samples.items()}
    for group in sorted(groups, key=lambda group: group[0].case.shape.distance(shape)):
        yield _Near(tuple(group), seconds)


def _of_one_jax(group: Sequence[Measurement]) -> list[Measurement]:
    """Keeps the measurements of the running JAX version, or else of the newest.

    Times of different versions do not compare.
    """
    minors = {measurement.jax for measurement in group}
    here = ".".join(jax.__version__.split(".")[:2])
    # As numbers: 0.10 is newer than 0.9.
    used = here if here in minors else max(minors, key=lambda minor: [int(part) for part in minor.split(".") if part])
    return [measurement for measurement in group if measurement.jax == used]


def _chosen(
    table: _Measurements,
    call: OpCall,
    candidates: _Candidates,
    forward: TunedChoice | None,
) -> TunedChoice | None:
    shape = shape_of(call)
    nearby = {direction: table.near(shape, direction) for direction in ("forward", "backward")}
    estimates = _estimates(nearby[call.direction], candidates)
    if forward is not None:
        return _advice(_seconds_after(forward, nearby["forward"], estimates), shape, with_speedup=False)
    gradients = _estimates(nearby["backward"], candidates, joint=True, tried_before=bool(estimates))
    # Value and gradient take the joint time, or F(f) and the fastest gradient that works after any f.
    foreign_s = _fastest_foreign_s(nearby["backward"], candidates)
    pairs = {estimate: estimate.seconds for estimate in gradients}
    if foreign_s < math.inf:
        pairs |= {estimate: estimate.seconds + foreign_s for estimate in estimates}
    return _advice(pairs or {estimate: estimate.seconds for estimate in estimates}, shape)


def _estimates(
    nearby: Sequence[_Near],
    candidates: _Candidates,
    *,
    joint: bool = False,
    tried_before: bool = False,
) -> list[_Estimate]:
    """Returns estimates at the nearest sizes where a candidate was measured and all preferred candidates were tried.

    A preferred implementation that was never tried may be faster than the measured ones, so it stays the choice until
    it is measured too.

    Args:
      nearby: measurements by increasing distance.
      candidates: the implementations to choose from.
      joint: only implementations whose forward and backward pass are measured together.
      tried_before: the preferred candidates were already tried in the other direction.
    """
    needed = set(preferred(candidates.implementations))
    for near in nearby:
        tried = {measurement.implementation for measurement in near.measurements}
        found = [estimate for estimate in _decoded(near, candidates) if estimate.measurement.whole or not joint]
        if found and (tried_before or needed <= tried):
            return found
    return []


def _decoded(near: _Near, candidates: _Candidates) -> Iterator[_Estimate]:
    """Yields the measurements of candidates whose stored config still fits the config type of the implementation."""
    for measurement in near.measurements:
        if measurement.outcome == "measured" and measurement.implementation in candidates.defaults:
            with contextlib.suppress(ValueError):
                config = decoded_config(measurement.config, candidates.defaults[measurement.implementation])
                yield _Estimate(measurement, config, near.seconds[measurement.candidate])


def _fastest_foreign_s(nearby: Sequence[_Near], candidates: _Candidates) -> float:
    """Returns the fastest gradient that works after any forward pass; infinite if none was measured."""
    for near in nearby:
        found = [
            near.seconds[measurement.candidate]
            for measurement in near.measurements
            if measurement.outcome == "measured"
            and not (measurement.whole and measurement.implementation in candidates.defaults)
        ]
        if found:
            return min(found)
    return math.inf


def _seconds_after(
    forward: TunedChoice, nearby: Sequence[_Near], estimates: Sequence[_Estimate]
) -> dict[_Estimate, float]:
    """Returns the seconds of value and gradient with each backward pass, after the given forward pass."""
    # In the form of `Measurement.candidate`, the key of the seconds.
    config = json.dumps(encoded_config(forward.config), sort_keys=True)
    # The first suffices: all shapes near a forward call share one mapping of seconds.
    forward_s = next((near.seconds.get((forward.implementation, config)) for near in nearby), None)
    seconds: dict[_Estimate, float] = {}
    for estimate in estimates:
        if not estimate.measurement.whole or estimate.measurement.implementation != forward.implementation:
            seconds[estimate] = estimate.seconds + (forward_s or 0.0)
        elif estimate.config == forward.config:
            if forward_s is None:  # no other pair is known to be better
                return {estimate: estimate.seconds}
            seconds[estimate] = estimate.seconds
    return seconds


def _advice(seconds: Mapping[_Estimate, float], shape: CallShape, *, with_speedup: bool = True) -> TunedChoice | None:
    """Chooses the fastest estimate and describes it, with its speedup over the fastest other implementation."""
    if not seconds:
        return None
    best = min(seconds, key=lambda estimate: seconds[estimate])
    measurement = best.measurement
    rivals = [estimate for estimate in seconds if estimate.measurement.implementation != measurement.implementation]
    second = min(rivals, key=lambda estimate: seconds[estimate], default=None) if with_speedup else None
    times = (
        ""
        if second is None
        else f"; {seconds[second] / seconds[best]:.2f} x as fast as {second.measurement.implementation}"
    )
    scope = {True: "value and gradient", False: measurement.case.direction}[measurement.whole]
    where = f"{scope} {duration(measurement.median_s)} at {measurement.case.shape}"
    here = "" if measurement.case.shape.bucket == shape.bucket else f"; about {duration(best.seconds)} here"
    conditions = f"{measurement.rounds} rounds, jax {measurement.versions.get('jax', 'unknown')}"
    return TunedChoice(measurement.implementation, best.config, f"{where} ({conditions}){here}{times}")


def duration(seconds: float) -> str:
    """Formats seconds with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _nearest(chip: Chip, known: Iterable[ChipName]) -> ChipName | None:
    """Wraps `nearest_chip`.

    The chip's peaks, which may need a measurement, are read only if several chips are similar.
    """
    name = ChipName(chip.kind, chip.model)
    relatives = [other for other in known if chip_platform(other.kind) == chip_platform(name.kind)]
    return nearest_chip(name if name in relatives or len(relatives) < 2 else ChipName.of(chip), relatives)


def nearest_chip(name: ChipName, known: Iterable[ChipName]) -> ChipName | None:
    """Returns the chip itself, or the chip of its platform with the nearest peaks; None without such a chip."""
    relatives = [other for other in known if chip_platform(other.kind) == chip_platform(name.kind)]
    if name in relatives:
        return name
    return min(relatives, key=lambda other: (_apart(name.rates, other.rates), str(other)), default=None)


def _apart(rates: Mapping[str, float], references: Mapping[str, float]) -> float:
    """Returns the mean |log| of the ratios of the rates that both have; infinite if they share no rate."""
    shared = rates.keys() & references.keys()
    return sum(abs(math.log(rates[rate] / references[rate])) for rate in shared) / len(shared) if shared else math.inf


def chip_platform(kind: str) -> str:
    """Returns the platform of a kind of chip; different platforms share no implementations."""
    for platform, pattern in _PLATFORMS.items():
        if re.match(pattern, kind.lower()):
            return platform
    return kind


# GPUs before TPUs: "v100" is one, "v5e" is not.
_PLATFORMS = {"cpu": r"cpu", "gpu": r"nvidia|amd|[abhlv]\d{2,}", "tpu": r"tpu|v\d"}
