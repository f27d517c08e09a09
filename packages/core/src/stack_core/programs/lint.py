"""Lint of a compiled train step: how its parameters are gathered and reduced, and which collectives cost too much.

Collectives do not name parameters, so they are matched by shape. Parameters of equal shape are reported together.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stack_core.programs.hlo_costs import Collective

__all__ = ["Fault", "LintedParameter", "ProgramLint", "lint_program"]

FaultKind = Literal[
    "replicated",
    "gradient summed whole",
    "more than a layer gathered",
    "moved in an inner loop",
    "gathered across slices",
]

# Replicated parameters up to this share of all parameters, such as norm scales, are accepted.
_SMALL_SHARE = 1e-3
_GRADIENTS = ("all-reduce",)


@dataclass(frozen=True, kw_only=True)
class LintedParameter:
    """Shape and sharding of a parameter.

    Attributes:
      name: path in the model.
      shape: full shape.
      part: shape of one device's shard.
      layers: whether the first axis stacks layers.
      bytes: size of one element.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    layers: bool
    bytes: int

    @property
    def global_bytes(self) -> int:
        return math.prod(self.shape) * self.bytes

    @property
    def is_split(self) -> bool:
        return self.shape != self.part


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An avoidable cost of the program.

    Attributes:
      kind: name of the check that found it.
      parameters: names of all parameters that match the array.
      bytes: size of the array moved per execution, or of the replicated parameter.
      times: executions per step; 1 for a replicated parameter.
      loops: names of the enclosing loops, outermost first.
    """

    kind: FaultKind
    parameters: tuple[str, ...]
    bytes: int
    times: int = 1
    loops: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.parameters[:2]) + (f" and {len(self.parameters) - 2} more" * (len(self.parameters) > 2))
        size = f"{self.bytes / 2**20:,.1f} MiB"
        remedy = _REMEDIES[self.kind]
        where = f" x {self.times:,} in {self.loops[-1]}" if self.loops else ""
        return f"{self.kind}: {names}, {size}{where}. {remedy}"


_REMEDIES: Mapping[str, str] = {
    "replicated": "Split one of its axes with mesh.rules, or with the logical axes of its family.",
    "gradient summed whole": "Each device keeps a shard of it: constrain the gradient to the parameter's sharding, and "
    "the sum becomes a reduce-scatter. If it is, the compiler sums in full over so many devices: reduce mesh.fsdp.",
    "more than a layer gathered": "Gather inside the loop over layers, one layer at a time.",
    "gathered across slices": "The network between slices is slow: gather within a slice. Let mesh.data or mesh.stage "
    "span the slices (mesh.dcn_data, mesh.dcn_stage).",
    "moved in an inner loop": "It is the same in every trip: gather it, and sum its gradient, outside of the loop.",
}


@dataclass(frozen=True, kw_only=True)
class ProgramLint:
    """Result of `lint_program`.

    Attributes:
      largest: for each parameter, the collective that moves the largest array of its shape, or None.
      replicated_bytes: total size of the replicated parameters.
      faults: faults by descending cost (bytes * times).
    """

    largest: Mapping[str, Collective | None]
    replicated_bytes: int
    faults: tuple[Fault, ...]

    def as_mapping(self) -> dict[str, object]:
        """Returns the result as plain values for JSON."""
        return {
            "replicated_bytes": self.replicated_bytes,
            "faults": [
                {
                    "kind": fault.kind,
                    "parameters": list(fault.parameters),
                    "bytes": fault.bytes,
                    "times": fault.times,
                    "loops": list(fault.loops),
                }
                for fault in self.faults
            ],
            "largest_collectives": {
                name: None
                if found is None
                else {
                    "kind": found.kind,
                    "bytes": max(array.bytes for array in found.arrays),
                    "times": found.times,
                    "loop": found.loops[-1] if found.loops else None,
                }
                for name, found in self.largest.items()
            },
        }


def lint_program(
    found: Sequence[Collective], parameters: Sequence[LintedParameter], *, outer_trips: int = 1
) -> ProgramLint:
    """Checks how the collectives of a train step treat its parameters.

        replicated                  stored in full by every device, and more than a thousandth of all parameters
        gradient summed whole       an all-reduce of more than a device's shard of a sharded parameter
        more than a layer gathered  an all-gather of several layers of a parameter that is stacked over layers
        moved in an inner loop      a collective of a parameter without layers, more often than once a microbatch; an
                                    array that may as well belong to a layer is not reported
        gathered across slices      an all-gather of a sharded parameter among devices of several slices

    Args:
      found: collectives from `stack_core.programs.hlo_costs.collectives`.
      parameters: shapes and shardings of the step's parameters.
      outer_trips: microbatches that run one after another in a step.
    """
    largest: dict[str, Collective | None] = {parameter.name: None for parameter in parameters}
    faults: dict[tuple[str, tuple[str, ...]], Fault] = {}
    by_shape = _by_shape(parameters)
    for collective in found:
        for array in collective.arrays:
            forms = _merged_forms(array.dims, len(collective.group)) if collective.between_slices else [array.dims]
            dims, matches = _first_match(forms, by_shape)
            in_layer = any(alike[0].layers for alike in matches)
            for alike in matches:
                for parameter in alike:
                    known = largest[parameter.name]
                    if known is None or array.bytes > max(each.bytes for each in known.arrays):
                        largest[parameter.name] = collective
                for kind in _faults_of(collective, dims, alike[0], outer_trips, in_layer):
                    names = tuple(parameter.name for parameter in alike)
                    fault = Fault(
                        kind=kind,
                        parameters=names,
                        bytes=array.bytes,
                        times=collective.times,
                        loops=collective.loops,
                    )
                    before = faults.get((kind, names))
                    if before is None or before.bytes * before.times < fault.bytes * fault.times:
                        faults[kind, names] = fault
    total = sum(parameter.global_bytes for parameter in parameters)
    whole = [parameter for parameter in parameters if not parameter.is_split]
    large = [parameter for parameter in whole if parameter.global_bytes > _SMALL_SHARE * total]
    replicated = [
        Fault(kind="replicated", parameters=(parameter.name,), bytes=parameter.global_bytes) for parameter in large
    ]
    ordered = sorted([*replicated, *faults.values()], key=lambda fault: -fault.bytes * fault.times)
    replicated_bytes = sum(parameter.global_bytes for parameter in whole)
    return ProgramLint(largest=largest, replicated_bytes=replicated_bytes, faults=tuple(ordered))


def _by_shape(parameters: Iterable[LintedParameter]) -> list[tuple[LintedParameter, ...]]:
    """Groups the parameters by shape and sharding; drops parameters with a single element per layer."""
    groups: dict[tuple[object, ...], list[LintedParameter]] = {}
    for parameter in parameters:
        # Scalars would match too many arrays.
        if math.prod(parameter.shape[1:] if parameter.layers else parameter.shape) > 1:
            groups.setdefault((parameter.shape, parameter.part, parameter.layers), []).append(parameter)
    return [tuple(group) for group in groups.values()]


def _merged_forms(dims: Sequence[int], slices: int) -> Iterator[tuple[int, ...]]:
    """Yields the array's axes, with an axis over slices merged into a neighbour.

    Transfers between slices gather along an axis of their own: bf16[2,128,512] is a part of 256 x 512.
    """
    for place, size in enumerate(dims):
        if size == slices:
            rest = [*dims[:place], *dims[place + 1 :]]
            for other in {max(place - 1, 0), min(place, len(rest) - 1)} if rest else ():
                yield (*rest[:other], rest[other] * slices, *rest[other + 1 :])
    yield tuple(dims)


def _first_match(
    forms: Iterable[Sequence[int]], by_shape: Sequence[tuple[LintedParameter, ...]]
) -> tuple[Sequence[int], list[tuple[LintedParameter, ...]]]:
    """Returns the first of the forms that parameters have, with these parameters."""
    dims: Sequence[int] = ()
    for dims in forms:
        if matches := list(_matching(dims, by_shape)):
            return dims, matches
    return dims, []


def _matching(
    dims: Sequence[int], by_shape: Sequence[tuple[LintedParameter, ...]]
) -> Iterator[tuple[LintedParameter, ...]]:
    """Yields the parameters whose axes the array has, in the same order if there are any, otherwise in any order."""
    in_order = [group for group in by_shape if _layers_in(dims, group[0], transposed=False) is not None]
    # Gradients may be transposed, but a match in order is more likely the parameter.
    yield from in_order or (group for group in by_shape if _layers_in(dims, group[0]) is not None)


def _layers_in(dims: Sequence[int], parameter: LintedParameter, *, transposed: bool = True) -> int | None:
    """Returns the number of layers of a parameter in an array.

    Args:
      transposed: whether the array's axes may be in another order than the parameter's.

    Returns:
      None for an array of other axes or, if the parameter is split, within a device's shard.
    """
    layers = parameter.shape[0] if parameter.layers else 1
    axes = list(zip(parameter.shape, parameter.part, strict=True))[1 if parameter.layers else 0 :]
    if len(axes) < 2:  # Vectors of all kinds have the same shape.
        return None
    sizes = [size for size in dims if size > 1]
    own = math.prod(part for _, part in axes)
    for count in {1, layers}:  # An array holds one layer or all of them.
        for kept in _ways_to_hold(axes):
            wanted = [*([(count, count)] if count > 1 else []), *((size, part) for size, part in kept if size > 1)]
            if len(wanted) == len(sizes) and any(
                all(size % part == 0 and whole % size == 0 for size, (whole, part) in zip(order, wanted, strict=True))
                for order in (itertools.permutations(sizes) if transposed else [sizes])
            ):
                return count if math.prod(sizes) > own * count or not parameter.is_split else None
    return None


def _ways_to_hold(axes: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Yields the axes that an array of the parameter may have: all, or all but those with one element per device."""
    yield axes
    longer = [(size, part) for size, part in axes if part > 1]
    if 2 <= len(longer) < len(axes):
        yield longer


def _faults_of(
    collective: Collective, dims: Sequence[int], parameter: LintedParameter, outer_trips: int, in_layer: bool
) -> Iterator[FaultKind]:
    layers = _layers_in(dims, parameter) or 0
    gathers = collective.kind == "all-gather" or collective.is_gather
    if collective.kind in _GRADIENTS and parameter.is_split and not gathers:
        yield "gradient summed whole"
    if gathers and layers > 1:
        yield "more than a layer gathered"
    if gathers and parameter.is_split and collective.between_slices:
        yield "gathered across slices"
    if not in_layer and collective.loops and collective.times > outer_trips:
        yield "moved in an inner loop"
