"""Targets: hardware to compile for, which need not be attached.

    target = Target("v5p:8x16x16")
    mesh = make_mesh(MeshConfig(tensor=8), target.devices)
    with use_target(target):
        compiled = jax.jit(step, in_shardings=...).lower(*shapes).compile()

The libtpu wheel compiles for TPUs and JAX's CUDA plugin for GPUs; neither needs a chip or a driver.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stack_core.abi.chips import Chip
from stack_core.abi.errors import HardwareError, nearest
from stack_core.abi.installing import install_command
from stack_core.abi.plugins import registries
from stack_core.chips.context import use_chip
from stack_core.chips.gpu_configs import GPU_CONFIGS

if TYPE_CHECKING:
    import jax

__all__ = ["Target", "use_target"]

_GPUS_A_HOST: Final = 8


@dataclass(frozen=True, kw_only=True)
class _TpuKind:
    """A kind of TPU.

    Attributes:
      name: libtpu's name for the kind.
      axes: number of axes of the torus.
      largest_chips: number of chips in the largest slice.
      options: additional arguments of `get_topology_desc`.
    """

    name: str
    axes: int
    largest_chips: int
    options: Mapping[str, Any] = field(default_factory=dict)


# Largest slices: Cloud TPU documentation, "System architecture" of each version.
_TPUS: Final = {
    "v4": _TpuKind(name="v4", axes=3, largest_chips=4096, options={"chip_config_name": "megacore"}),
    "v5e": _TpuKind(name="v5e", axes=2, largest_chips=256),
    "v5p": _TpuKind(name="v5p", axes=3, largest_chips=8960),
    "v6e": _TpuKind(name="v6e", axes=2, largest_chips=256),
    "v7x": _TpuKind(name="tpu7x", axes=3, largest_chips=9216),
}

# Without these, libtpu on a machine without a TPU queries Google's metadata server for the machine type, prints errors
# because it gets no answer, and keeps other processes from compiling at the same time.
_WITHOUT_TPU: Final = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Target:
    """One or more slices of TPUs, or a group of GPUs, by name.

    Attributes:
      name: "CHIP:SIZES". CHIP is a name in the registry `chips`. The sizes of a TPU are the axes of its torus,
        "v5p:8x16x16" or "v6e:4x4"; "v5p:4x4x4*2" is two such slices. The sizes of GPUs are
        slices x hosts x GPUs per host, "h100:1x1x8".

    Raises:
      HardwareError: the name is malformed, its chip is unknown, or no such topology exists.
    """

    name: str

    def __post_init__(self) -> None:
        match = re.fullmatch(r"([\w.\-]+):(\d+(?:x\d+)*)(?:\*(\d+))?", self.name)
        if match is None:
            raise HardwareError(
                f"Target {self.name!r} is not of the form CHIP:SIZES, such as v5p:8x16x16 or v6e:4x4 (a TPU's torus), "
                "v5p:4x4x4*2 (two slices), or h100:1x1x8 (slices x hosts x GPUs per host)."
            )
        known = sorted({**_TPUS, **GPU_CONFIGS})
        if match[1] not in known:
            raise HardwareError(
                f"Target {self.name!r}: nothing is known about compiling for {match[1]!r}.{nearest(match[1], known)} "
                f"Targets: {', '.join(known)}."
            )
        if match[3] is not None and (match[1] not in _TPUS or int(match[3]) < 1):
            raise HardwareError(
                f"Target {self.name!r}: *{match[3]} is not a number of slices. TPUs take *1 or more, as in "
                "v5p:4x4x4*2; for GPUs the number of slices is the first size, as in h100:2x1x8."
            )
        check = self._check_torus if match[1] in _TPUS else self._check_hosts
        check()

    @property
    def chip_name(self) -> str:
        return self.name.partition(":")[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of one slice of TPUs, or slices x hosts x GPUs per host."""
        return tuple(int(size) for size in self.name.partition(":")[2].partition("*")[0].split("x"))

    @property
    def slices(self) -> int:
        """Number of slices, between which the network is slower than within one."""
        return int(self.name.partition("*")[2] or 1) if self.chip_name in _TPUS else self.sizes[0]

    def slice_of(self, device: "jax.Device") -> int:
        """Returns the index of the slice that has the device."""
        if self.slices == 1:  # a TPU of a single slice has no slice_index
            return 0
        # On GPUs slice_index counts hosts.
        return device.slice_index if self.chip_name in _TPUS else device.process_index // self.sizes[1]

    @property
    def chip(self) -> Chip:
        """Row of the registry `chips`.

        Raises:
          UnknownName: the plugin that registers the row is blocked.
        """
        return registries.chips[self.chip_name]

    @functools.cached_property
    def devices(self) -> tuple["jax.Device", ...]:
        """Devices to compile for; they cannot hold arrays.

        Raises:
          HardwareError: the compiler is not installed, or does not load.
        """
        return _tpu_devices(self) if self.chip_name in _TPUS else _gpu_devices(self)

    def link_share(self, devices: Sequence["jax.Device"]) -> float | None:
        """Returns the share of a chip's links that it can use to communicate with all the given devices.

        On a torus, every axis along which the devices differ contributes the same share, as if each axis were a ring.
        GPUs of one host use all of NVLink.

        Returns:
          None for GPUs of several hosts and TPUs of several slices, because the network between them is unknown.
        """
        if len({self.slice_of(device) for device in devices}) > 1:
            return None
        if self.chip_name not in _TPUS:
            return 1.0 if len({device.process_index for device in devices}) == 1 else None
        coordinates = [tuple(getattr(device, "coords", ())) for device in devices]
        spanned = sum(len(set(places)) > 1 for places in zip(*coordinates, strict=True))
        return max(spanned, 1) / _TPUS[self.chip_name].axes

    def _check_torus(self) -> None:
        kind, sizes = _TPUS[self.chip_name], self.sizes
        if len(sizes) != kind.axes:
            example = "x".join(["2", "2", "1"][: kind.axes])
            raise HardwareError(
                f"Target {self.name!r} has {len(sizes)} sizes; the torus of a {self.chip_name} has {kind.axes} axes, "
                f"as in {self.chip_name}:{example}."
            )
        chips = math.prod(sizes)
        if chips > kind.largest_chips:
            raise HardwareError(
                f"Target {self.name!r} has {chips} chips; the largest slice of {self.chip_name} has "
                f"{kind.largest_chips}. Use fewer chips."
            )
        if chips != 1 and (0 in sizes or any(size % 2 for size in sizes[:2])):
            raise HardwareError(
                f"Target {self.name!r} does not exist: a host of {self.chip_name} has 2x2 chips, so the first two "
                f"sizes must be even, except for a single chip. Nearest: {' or '.join(self._even_neighbours())}."
            )

    def _even_neighbours(self) -> list[str]:
        rest = [max(size, 1) for size in self.sizes[2:]]
        found = []
        for up in (0, 1):
            sizes = [*(max((size + up) // 2 * 2, 2) for size in self.sizes[:2]), *rest]
            if math.prod(sizes) <= _TPUS[self.chip_name].largest_chips:
                found.append(f"{self.chip_name}:{'x'.join(map(str, sizes))}")
        return list(dict.fromkeys(found))

    def _check_hosts(self) -> None:
        sizes = self.sizes
        if len(sizes) != 3 or 0 in sizes or sizes[2] > _GPUS_A_HOST:
            raise HardwareError(
                f"Target {self.name!r}: the sizes of GPUs are slices x hosts x GPUs per host, with at most "
                f"{_GPUS_A_HOST} per host, as in {self.chip_name}:1x1x{_GPUS_A_HOST} or "
                f"{self.chip_name}:1x4x{_GPUS_A_HOST}."
            )


@contextlib.contextmanager
def use_target(target: Target) -> Iterator[None]:
    """Traces and lowers for the target: ops choose implementations for its chip, and kernels see its devices.

    JAX's default device becomes the target's first, which cannot run anything. Create arrays before or after this
    context, or in a trace.

    Raises:
      HardwareError: as in `Target.devices`.
    """
    import jax

    device = target.devices[0]
    # Libraries of kernels read the kind of device from the abstract mesh, not from the default device.
    of_device = jax.sharding.Mesh([device], ("device",)).abstract_mesh.abstract_device
    mesh = jax.sharding.get_abstract_mesh().update(abstract_device=of_device)
    with use_chip(target.chip), jax.default_device(device), jax.sharding.use_abstract_mesh(mesh):
        yield


def _tpu_devices(target: Target) -> tuple["jax.Device", ...]:
    from jax.experimental import topologies  # Importing jax sets TPU_SKIP_MDS_QUERY on machines without a TPU.

    _require(target, "tpu", "libtpu")
    kind, sizes = _TPUS[target.chip_name], target.sizes
    topology = f"{kind.name}:{'x'.join(map(str, sizes))}"
    options = dict(kind.options) | ({"num_slices": target.slices} if target.slices > 1 else {})
    if math.prod(sizes) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)  # hosts have 2x2 chips by default
    with _environment(_WITHOUT_TPU if "TPU_SKIP_MDS_QUERY" in os.environ else {}):
        try:
            description = topologies.get_topology_desc(topology, platform="tpu", **options)
        except RuntimeError as error:
            raise HardwareError(f"libtpu offers no topology for target {target.name!r}: {error}") from error
    return tuple(description.devices)


def _gpu_devices(target: Target) -> tuple["jax.Device", ...]:
    from jax.experimental import topologies

    _require(target, "cuda13", "jax_cuda13_plugin", "jax_cuda12_plugin")
    (entry,) = (entry for entry in registries.chips.entries() if entry.name == target.chip_name)
    config = GPU_CONFIGS[target.chip_name].text_proto(target.chip, entry.details["device_kinds"][0])

    def describe() -> Any:
        sizes = "x".join(map(str, target.sizes))
        return topologies.get_topology_desc(target.chip_name, "cuda", topology=sizes, target_config=config)

    # Without this the plugin does not load if CUDA libraries are missing, although only running on a GPU needs them.
    with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
        try:
            try:
                description = describe()
            except NotImplementedError:  # JAX loads plugins only once, here before the variable was set.
                _load_cuda_plugin()
                description = describe()
        except RuntimeError as error:
            raise HardwareError(
                f"JAX's CUDA plugin offers no topology for target {target.name!r}: {error}. Check that its version "
                f"matches jax: {install_command('stack-core[cuda13]', upgrade=True)}"
            ) from error
    return tuple(description.devices)


def _load_cuda_plugin() -> None:
    installed = "xla_cuda13" if importlib.util.find_spec("jax_cuda13_plugin") else "xla_cuda12"
    importlib.import_module(f"jax_plugins.{installed}").initialize()


def _require(target: Target, extra: str, *modules: str) -> None:
    if not any(importlib.util.find_spec(module) for module in modules):
        raise HardwareError(
            f"Compiling for {target.name!r} needs {modules[0]}, which is not installed. "
            f"No {target.chip_name} is needed: {install_command(f'stack-core[{extra}]')}"
        )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables that are unset, and removes them again afterwards."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
