"""The machine's GPUs and TPUs, compared with the devices that JAX uses."""

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stack_core.abi.findings import Finding
from stack_core.abi.installing import install_command
from stack_core.doctor.backend import Answer

__all__ = ["Gpu", "Hardware", "check_hardware", "find_hardware"]

_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # GPUs with and without a display; excludes NVIDIA's network cards
# As in jax/_src/hardware_utils.py: TPU v2 and v3, v4, v5p, v5e, v6e, v7x, v8i, v8t.
_TPU_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c"})
_GPU_NODES = ("dev/nvidia0", "dev/nvidiactl")  # a container may have only the second
_SMI_S = 15.0
_SMI_FIELDS = "name,driver_version,compute_cap,memory.total,memory.used"
_MIB = 2**20

# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes: CUDA 13 runs on Turing and later.
_CUDA13_DRIVER = 580
_CUDA13_COMPUTE = 7.5


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi`; numbers that it does not report are None.

    Attributes:
      name: product name.
      driver: driver version.
      compute: compute capability.
      memory_bytes: total memory.
      used_bytes: memory in use.
    """

    name: str
    driver: str
    compute: float | None
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class Hardware:
    """Accelerators as the operating system reports them, without their libraries.

    Attributes:
      nvidia_cards: number of NVIDIA GPUs on the PCI bus; a container may hide the bus.
      nvidia_driver: whether NVIDIA's driver provides device nodes.
      gpus: GPUs listed by `nvidia-smi`.
      tpus: number of TPUs on the PCI bus.
    """

    nvidia_cards: int = 0
    nvidia_driver: bool = False
    gpus: tuple[Gpu, ...] = ()
    tpus: int = 0

    @property
    def has_gpu(self) -> bool:
        return bool(self.nvidia_cards or self.nvidia_driver or self.gpus)


@functools.cache
def find_hardware(root: Path = Path("/")) -> Hardware:
    """Collects the accelerators reported by the system and `nvidia-smi`."""
    cards = tpus = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind, identity = ((device / name).read_text().strip() for name in ("vendor", "class", "device"))
            cards += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES)
            tpus += vendor == _GOOGLE and identity in _TPU_IDS and device.name.endswith(".0")
    driver = any((root / node).exists() for node in _GPU_NODES)
    # A container may hide the PCI bus and still have the device nodes.
    return Hardware(cards, driver, _listed_gpus(), tpus or len(list((root / "dev").glob("accel[0-9]*"))))


def _listed_gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SMI_S)
    except (OSError, subprocess.SubprocessError):  # the driver is missing or hangs; JAX's own error is more specific
        return ()
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.count(",") == _SMI_FIELDS.count(","))


def _gpu(line: str) -> Gpu:
    name, driver, compute, total, used = (part.strip() for part in line.split(","))
    total_mib, used_mib = _number(total), _number(used)
    return Gpu(
        name,
        driver,
        _number(compute),
        None if total_mib is None else int(total_mib * _MIB),
        None if used_mib is None else int(used_mib * _MIB),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def check_hardware(
    hardware: Hardware, answer: Answer, environ: Mapping[str, str], distributions: Mapping[str, object]
) -> Iterator[Finding]:
    """Checks that JAX uses the available accelerators, and names the pip extra that it lacks."""
    if hardware.has_gpu:
        yield from _check_gpus(hardware, answer, environ, distributions)
    if hardware.tpus:
        yield from _check_tpus(hardware, answer, environ, distributions)
    if not hardware.has_gpu and not hardware.tpus and answer.platform == "cpu":
        yield Finding("accelerators", "ok", "no NVIDIA GPU or TPU was found, and JAX runs on the CPU")


def _check_gpus(
    hardware: Hardware, answer: Answer, environ: Mapping[str, str], distributions: Mapping[str, object]
) -> Iterator[Finding]:
    there = f"{hardware.gpus[0].name}, driver {hardware.gpus[0].driver}" if hardware.gpus else "an NVIDIA GPU"
    plugin = next((name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if name in distributions), None)
    if answer.platform == "gpu":
        yield from _gpu_use(hardware, answer)
    elif (hiding := _hidden(environ)) is not None:
        yield Finding("gpu", "note", f"{there} is present, but {hiding} hides it", "Unset it to use the GPU.")
    elif not hardware.nvidia_driver and not hardware.gpus:
        yield Finding(
            "gpu",
            "warning",
            "an NVIDIA GPU is on the PCI bus, but its driver is not loaded (/dev/nvidia0 does not exist)",
            f"Install NVIDIA's driver, release {_CUDA13_DRIVER} or later; a container must be started with access to "
            "the GPU (docker run --gpus all).",
        )
    elif plugin is None:
        found = f"{there} is present, but JAX is installed without CUDA and does not use it"
        yield Finding("gpu", "warning", found, _cuda_advice(hardware))
    else:
        said = f": {answer.log}" if answer.log else ""
        yield Finding(
            "gpu",
            "problem",
            f"{there} and {plugin} are present, but JAX runs on {answer.platform or 'nothing'}{said}",
            _cuda_advice(hardware),
        )


def _hidden(environ: Mapping[str, str]) -> str | None:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & {name.strip() for name in platforms.split(",")}:
        return f"JAX_PLATFORMS={platforms}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None or visible.strip() not in ("", "-1") else f"CUDA_VISIBLE_DEVICES={visible!r}"


def _cuda_advice(hardware: Hardware) -> str:
    """Returns the installation command for the CUDA release that the driver and GPU support."""
    for gpu in hardware.gpus:
        if gpu.compute is not None and gpu.compute < _CUDA13_COMPUTE:
            return f"CUDA 13 does not support {gpu.name}: {install_command('jax[cuda12]')}"
        release = _number(gpu.driver.split(".")[0])
        if release is not None and release < _CUDA13_DRIVER:
            return (
                f"CUDA 13 needs driver {_CUDA13_DRIVER} or later; {gpu.driver} is installed. Update the driver and "
                f"{install_command('stack-core[cuda13]')}, or keep it and {install_command('jax[cuda12]')}"
            )
    return install_command("stack-core[cuda13]", upgrade=True)


def _gpu_use(hardware: Hardware, answer: Answer) -> Iterator[Finding]:
    used = sum(device["local"] for device in answer.devices)
    if hardware.gpus and used < len(hardware.gpus):
        found = f"JAX uses {used} of the {len(hardware.gpus)} GPUs"
        yield Finding("gpu", "note", found, "CUDA_VISIBLE_DEVICES selects GPUs; if unset, JAX uses all.")
    for index, gpu in enumerate(hardware.gpus):
        # The probe allocates little, so a tenth belongs to other processes.
        if gpu.memory_bytes and gpu.used_bytes is not None and gpu.used_bytes > gpu.memory_bytes / 10:
            found = (
                f"other processes hold {gpu.used_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB "
                f"of GPU {index}, {gpu.name}"
            )
            yield Finding("gpu", "warning", found, "`nvidia-smi` lists the processes; end those you do not need.")


def _check_tpus(
    hardware: Hardware, answer: Answer, environ: Mapping[str, str], distributions: Mapping[str, object]
) -> Iterator[Finding]:
    there = f"{hardware.tpus} TPU chips are present"
    platforms = environ.get("JAX_PLATFORMS", "")
    if answer.platform == "tpu":
        return
    if platforms and "tpu" not in platforms:
        found = f"{there}, but JAX_PLATFORMS={platforms} hides them from JAX"
        yield Finding("tpu", "note", found, "Unset it to use the TPU.")
    elif "libtpu" not in distributions:
        found = f"{there}, but libtpu is not installed, so JAX does not use them"
        yield Finding("tpu", "warning", found, install_command("stack-core[tpu]"))
    else:
        said = f": {answer.log}" if answer.log else ""
        yield Finding(
            "tpu",
            "problem",
            f"{there} and libtpu is installed, but JAX runs on {answer.platform or 'nothing'}{said}",
            "Only one process at a time can use a TPU: end the other (`sudo lsof -w /dev/accel* /dev/vfio/*` lists "
            f"it). If there is none: {install_command('stack-core[tpu]', upgrade=True)}",
        )
