"""Device groups of collectives, in all forms that XLA prints."""

import math
import re
from typing import Final

import numpy as np

from stack_core.programs.hlo import Instruction

__all__ = ["device_groups"]


def device_groups(instruction: Instruction, device_count: int) -> tuple[tuple[int, ...], ...]:
    """Parses the device groups of a collective; without explicit groups, returns one group of all devices.

    The groups of a collective-permute are its pairs of source and target.
    """
    attributes = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]+\})\}", attributes):
        return tuple((int(source), int(target)) for source, target in re.findall(r"(\d+),(\d+)", pairs[1]))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", attributes):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        return _rows(_iota(iota[3], iota[4]).reshape(-1, int(iota[2])))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) \{([^}]*)\}", attributes):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    return (tuple(range(device_count)),)


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """Parses `[dims]T(permutation)`: an iota reshaped to dims and transposed."""
    places = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(dim) for dim in dims.split(",")])
    return places if permutation is None else places.transpose([int(axis) for axis in permutation.split(",")])


def _mesh_groups(axes: str, devices: str, over: str) -> tuple[tuple[int, ...], ...]:
    """Parses `mesh['a'=2,'b'=4], device_ids=(...) {'b','a':(1)2}`: the mesh axes that a group spans.

    `'a':(p)s` is the part of size s of an axis that is split into p, s and the rest. The device list may be an iota,
    `([dims]T(p))`.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", axes)}
    listed = devices.partition("device_ids=")[2]
    if iota := re.match(r"\(\[([\d,]+)\]T\(([\d,]+)\)", listed):
        numbers = _iota(iota[1], iota[2]).reshape(-1)
    else:
        numbers = np.array([*map(int, re.findall(r"\d+", listed))] or range(math.prod(sizes.values())))
    spanned = {name: (int(before or 1), int(part or 0)) for name, before, part in _AXES.findall(over)}
    shape: list[int] = []
    for name, size in sizes.items():
        before, part = spanned.get(name, (1, 1))
        part = part or size
        shape += [before, part, size // (before * part)]
    # The middle part of each axis varies within a group.
    inside = range(1, len(shape), 3)
    outside = [axis for axis in range(len(shape)) if axis % 3 != 1]
    places = numbers.reshape(shape).transpose([*outside, *inside])
    return _rows(places.reshape(-1, math.prod(shape[axis] for axis in inside)))


_AXES: Final = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")
