"""Meshes of the attached devices, or of a target's, in an order that suits their network."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from stack_core.abi.errors import HardwareError, ShardingError
from stack_core.abi.mesh import AXES, MeshConfig, divisors, nearest_values

__all__ = ["make_mesh"]

# From least to most traffic. The last axis gets the best links of a torus, elsewhere neighbouring device ids.
_BY_TRAFFIC = ("stage", "data", "fsdp", "context", "expert", "tensor")

# Axes that may span slices, in order of preference; their traffic is gradients, activations and parameters.
_ACROSS_SLICES = ("data", "stage", "fsdp")


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with all of `AXES`, over all `devices` (default: `jax.devices()`).

    The axes are of type Auto: XLA propagates shardings between constraints. `tensor` gets the fastest links. Slices
    are spread over `data`, `stage` and `fsdp`, whose traffic suits the slower network between slices: as the fields
    `dcn_*` of the config say, else over the first of these axes that divide their number. CPUs and GPUs have the slices
    that `dcn_*` asks for, each of consecutive devices.

    Raises:
      ShardingError: the product of the sizes differs from the number of devices, or the number of slices does not
        divide the product of those three axes, or is not what `dcn_*` asks for.
      HardwareError: the devices are of different kinds.
    """
    from jax.experimental import mesh_utils

    devices = jax.devices() if devices is None else list(devices)
    _check_kinds(devices)
    sizes = _axis_sizes(mesh, len(devices), _by_process(devices))
    # A single slice of a compile-only topology has no slice_index; on CPUs and GPUs slice_index counts hosts.
    indices = {getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}
    slices = _slices_of(mesh, sizes, len(indices))
    # Sizes inside of a slice, in the order in which mesh_utils assigns links: the axis with the most traffic last.
    within = [sizes[axis] // slices[axis] for axis in _BY_TRAFFIC]
    across = [slices[axis] for axis in _BY_TRAFFIC]
    if len(indices) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    elif max(across) > 1:
        # The axes are (slices of axis 0, of axis 1, ..., size within a slice of axis 0, ...), to be interleaved.
        count = len(_BY_TRAFFIC)
        order = [place for axis in range(count) for place in (axis, count + axis)]
        grid = np.array(devices).reshape([*across, *within]).transpose(order)
        grid = grid.reshape([outer * inner for outer, inner in zip(across, within, strict=True)])
    else:
        grid = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    grid = grid.transpose([_BY_TRAFFIC.index(axis) for axis in AXES])
    # Passed because the defaults differ: Explicit in `jax.make_mesh`, Auto in `Mesh`.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_kinds(devices: Sequence[jax.Device]) -> None:
    """Refuses devices of several kinds: kernels, tuned choices and limits of memory are chosen for one."""
    kinds = Counter(device.device_kind for device in devices)
    if len(kinds) > 1:
        found = " and ".join(f"{count} of kind {kind!r}" for kind, count in sorted(kinds.items()))
        raise HardwareError(
            f"The mesh has devices of different kinds, {found}, but kernels and limits of memory are chosen for one "
            "kind. Select devices, on NVIDIA's GPUs with CUDA_VISIBLE_DEVICES."
        )


def _slices_of(mesh: MeshConfig, sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """Returns the number of slices that each axis spans.

    Args:
      sizes: size of each axis.
      slices: number of TPU slices; 0 on other devices, whose slices are what the config asks for.
    """
    requested = {axis: getattr(mesh, f"dcn_{axis}") for axis in _ACROSS_SLICES}
    if set(requested.values()) == {None}:
        return _across_slices(sizes, slices)
    spans = dict.fromkeys(sizes, 1) | {axis: count or 1 for axis, count in requested.items()}
    for axis, count in spans.items():
        if sizes[axis] % count:
            raise ShardingError(
                f"mesh.dcn_{axis} is {count}, but the axis has {sizes[axis]} devices. Set mesh.{axis} to a multiple of "
                f"{count}: it is the size over all slices."
            )
    if slices and math.prod(spans.values()) != slices:
        given = ", ".join(f"mesh.dcn_{axis}={spans[axis]}" for axis in _ACROSS_SLICES)
        raise ShardingError(
            f"The devices are {slices} slices, but the product of {given} is {math.prod(spans.values())}."
        )
    return spans


def _across_slices(sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """Spreads slices over the axes in the order of `_ACROSS_SLICES`."""
    spans, left = dict.fromkeys(sizes, 1), max(slices, 1)
    for axis in _ACROSS_SLICES:
        # Greedy in the order of `_ACROSS_SLICES`: an axis spans as many of the remaining slices as its size allows.
        spans[axis] = math.gcd(sizes[axis], left)
        left //= spans[axis]
    if left > 1:
        given = ", ".join(f"{axis}={sizes[axis]}" for axis in _ACROSS_SLICES)
        raise ShardingError(
            f"The devices are {slices} slices, which must divide the mesh's axes {', '.join(_ACROSS_SLICES)} together, "
            f"but these are {given}. Set mesh.data={slices}, or a multiple of it."
        )
    return spans


def _axis_sizes(mesh: MeshConfig, device_count: int, by_process: str = "") -> dict[str, int]:
    """Returns the size of every axis, with -1 resolved."""
    sizes = mesh.sizes
    rest = next((axis for axis, size in sizes.items() if size == -1), None)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if (rest is None and fixed != device_count) or device_count % fixed:
        raise ShardingError(_misfit(sizes, rest, fixed, device_count, by_process))
    return {axis: device_count // fixed if axis == rest else size for axis, size in sizes.items()}


def _misfit(sizes: Mapping[str, int], rest: str | None, fixed: int, device_count: int, by_process: str) -> str:
    """Builds the message for sizes whose product is not the number of devices, with the nearest sizes that fit."""
    listing = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    there = f"there are {device_count}{by_process}"
    remedies = []
    for axis, size in sizes.items():
        left, remainder = divmod(device_count, fixed // size)
        if size > 1 and not remainder:
            legal = divisors(left) if rest else [left]
            remedies.append(f"{axis}={' or '.join(map(str, nearest_values(legal, size)))}")
    if rest is None:
        problem = f"The mesh {listing or 'of one device'} takes {fixed} devices, but {there}."
        remedies.append("-1 for one axis, which gives it all that the others leave")
    else:
        problem = f"The mesh {listing} takes a multiple of {fixed} devices, but {there}."
    return f"{problem} These would fit: {'; '.join(remedies) or 'several axes changed together'}."


def _by_process(devices: Sequence[jax.Device]) -> str:
    """Describes the number of devices per process, or returns "" for a single process."""
    counts = Counter(device.process_index for device in devices)
    if len(counts) < 2:
        return ""
    each = sorted(set(counts.values()))
    return f" ({len(counts)} processes with {' or '.join(map(str, each))} each)"
