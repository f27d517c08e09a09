"""Division of a machine's devices among engine processes, without using a device in this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from stack_core.abi.errors import HardwareError

__all__ = ["EngineDevices", "devices_of_hosts", "divide_devices"]

_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}


@dataclass(frozen=True)
class EngineDevices:
    """Devices of one engine process.

    Attributes:
      environment: environment variables that select them, to be set before JAX uses a device.
      cores: CPU cores on which the process runs; empty means all.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


def devices_of_hosts(hosts: int, devices: int) -> EngineDevices:
    """Returns the devices of one engine on each of its hosts, which are all GPUs or TPU chips that JAX finds there.

    Args:
      hosts: number of hosts.
      devices: number of devices on all hosts together.
    """
    if _platform(Path("/")) == "cpu":
        return EngineDevices(_as_cpu_devices(devices // hosts))
    return EngineDevices()


def _as_cpu_devices(count: int) -> dict[str, str]:
    """Returns the environment in which JAX presents the cores as `count` devices."""
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={count}"]
    return {"XLA_FLAGS": " ".join(flags).strip()}


def divide_devices(engines: int, devices: int, *, root: Path = Path("/")) -> list[EngineDevices]:
    """Returns the devices of each engine.

    GPUs are selected by CUDA_VISIBLE_DEVICES and TPU chips by TPU_VISIBLE_CHIPS. On CPUs, each engine has an equal
    share of the cores, which JAX presents as `devices` devices.

    Args:
      engines: number of engines.
      devices: number of devices of each engine.

    Raises:
      HardwareError: there are too few devices, or cores.
    """
    platform = _platform(root)
    found = _found(platform, root)
    if engines * devices > len(found):
        kind = {"gpu": "GPUs", "tpu": "TPU chips", "cpu": "CPU cores"}[platform]
        each = f"{devices} each" if devices > 1 else "one each"
        raise HardwareError(
            f"{engines} engines with {each} need {engines * devices} {kind}, but there are {len(found)}. Lower "
            "data_parallel (--data-parallel), prefill_engines or the devices of an engine (--tensor)."
        )
    if platform == "cpu":
        share = len(found) // engines
        # XLA reads NPROC for the size of its thread pool, which exists before the process is bound to its cores.
        environment = {"NPROC": str(share)} | (_as_cpu_devices(devices) if devices > 1 else {})
        parts = [found[place * share : (place + 1) * share] for place in range(engines)]
        return [EngineDevices(environment, tuple(map(int, part))) for part in parts]
    parts = [found[place * devices : (place + 1) * devices] for place in range(engines)]
    if platform == "gpu":
        return [EngineDevices({"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]
    if devices not in _TPU_BOUNDS:
        raise HardwareError(
            f"{devices} TPU chips per engine: expected {', '.join(map(str, _TPU_BOUNDS))}, which form a rectangle. "
            "Change the devices of an engine (--tensor)."
        )
    bounds = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[devices]}
    return [EngineDevices({**bounds, "TPU_VISIBLE_CHIPS": ",".join(part)}) for part in parts]


def _platform(root: Path) -> Literal["gpu", "tpu", "cpu"]:
    """Returns the platform that JAX will choose in the engines' processes."""
    first = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if first:
        return "gpu" if first in ("cuda", "gpu") else "tpu" if first == "tpu" else "cpu"
    if _found("gpu", root) and any(map(find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        return "gpu"
    return "tpu" if _found("tpu", root) and find_spec("libtpu") else "cpu"


def _found(platform: Literal["gpu", "tpu", "cpu"], root: Path) -> list[str]:
    """Lists the names of the devices that this process may use."""
    if platform == "cpu":
        return [str(core) for core in sorted(os.sched_getaffinity(0))]
    selected = os.environ.get("CUDA_VISIBLE_DEVICES" if platform == "gpu" else "TPU_VISIBLE_CHIPS")
    if selected is not None:
        return [name.strip() for name in selected.split(",") if name.strip()]
    if platform == "gpu":
        count = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    else:
        count = len([*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")])
    return [str(number) for number in range(count)]
