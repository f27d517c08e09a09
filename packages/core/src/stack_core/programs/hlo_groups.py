"""Device groups of collectives, in all forms that XLA prints."""

import math
import re
from typing import Final

import numpy as np

from stack_core.programs.hlo import Instruction

__all__ = ["first_group"]


def first_group(instruction: Instruction, device_count: int) -> tuple[int, ...]:
    """Parses the first device group of a collective; without an explicit group, returns all devices.

    The first group of a collective-permute is its first pair of source and target.
    """
    attributes = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes):
        # A device may send to itself.
        return tuple(sorted({int(pairs[1]), int(pairs[2])}))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return tuple(int(number) for number in listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        return _iota_group(int(iota[2]), iota[3], iota[4])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) \{([^}]*)\}", attributes):
        return _mesh_group(mesh[1], mesh[2], mesh[3])
    return tuple(range(device_count))


def _iota_group(size: int, dims: str, permutation: str | None) -> tuple[int, ...]:
    """Parses `[groups,size]<=[dims]T(permutation)`: an iota reshaped to dims, transposed and reshaped to groups."""
    places = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(dim) for dim in dims.split(",")])
    if permutation is not None:
        places = places.transpose([int(axis) for axis in permutation.split(",")])
    return tuple(int(place) for place in places.reshape(-1, size)[0])


def _mesh_group(axes: str, devices: str, over: str) -> tuple[int, ...]:
    """Parses `mesh['a'=2,'b'=4], device_ids=(...) {'b','a':(1)2}`: the mesh axes that a group spans.

    `'a':(p)s` is the part of size s of an axis that is split into p, s and the rest. The device list may be an iota,
    `([dims]T(p))`.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", axes)}
    listed = devices.partition("device_ids=")[2]
    if iota := re.match(r"\(\[([\d,]+)\]T\(([\d,]+)\)", listed):
        numbers = _iota_group(math.prod(sizes.values()), iota[1], iota[2])
    else:
        numbers = tuple(map(int, re.findall(r"\d+", listed))) or tuple(range(math.prod(sizes.values())))
    places = np.array(numbers).reshape(list(sizes.values()))
    names = list(sizes)
    spanned = {name: (int(before or 1), int(part or 0)) for name, before, part in _AXES.findall(over)}
    index: list[int | slice] = []
    shape: list[int] = []
    for name in names:
        before, part = spanned.get(name, (1, 1))
        part = part or sizes[name]
        shape += [before, part, sizes[name] // (before * part)]
        index += [0, slice(None), 0]
    return tuple(int(place) for place in places.reshape(shape)[tuple(index)].reshape(-1))


_AXES: Final = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")
