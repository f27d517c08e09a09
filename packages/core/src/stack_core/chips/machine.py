"""What this machine has, and the part of it that this process may use; read from the system, without JAX."""

import contextlib
import ctypes
import gc
import os
import platform
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "cpu_flags",
    "cpu_model",
    "cpu_quota_cores",
    "give_memory_back",
    "memory_bytes",
    "resident_bytes",
    "usable_cores",
]

# A limit of the container: cgroup version 2, then version 1. Without a container there is no such file.
_MEMORY_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_MEMORY_USES = ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes")
_CPU_NUMBERS = {"family": "cpu family", "model": "model"}


def cpu_model(root: Path = Path("/")) -> str:
    """The CPU's name with its family and model, for virtual machines may shorten the name to that of a whole series.

    That of its architecture where the system does not tell.
    """
    fields = _cpu_fields(root)
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = ", ".join(f"{name} {fields[key]}" for name, key in _CPU_NUMBERS.items() if key in fields)
    return f"{fields['model name']} ({numbers})" if numbers else fields["model name"]


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """What the CPU can do, by Linux's names, such as "amx_bf16"; nothing where the system does not tell."""
    return frozenset(_cpu_fields(root).get("flags", "").split())


def usable_cores() -> int:
    """Cores that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """How many cores' worth of time a container grants, or None where it sets no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota_us) / int(period_us)  # "max" is no integer
    with contextlib.suppress(OSError, ValueError):
        quota_us = (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
        period_us = (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return int(quota_us) / int(period_us) if int(quota_us) > 0 else None
    return None


def memory_bytes(root: Path = Path("/")) -> int | None:
    """The machine's memory, or the part of it that a container may use; None where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min(total, _first_integer(root, _MEMORY_LIMITS) or total)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process holds; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def give_memory_back() -> None:
    """Returns to the system what this process has freed, which glibc keeps for later; does nothing without glibc."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that a new process can have without swapping; None where the system does not tell."""
    amounts = [_field(root / "proc/meminfo", "MemAvailable:", unit_bytes=1024)]
    limit, use = _first_integer(root, _MEMORY_LIMITS), _first_integer(root, _MEMORY_USES)
    if limit is not None and use is not None:
        # A container's use counts its cached files, which the system gives up when memory is needed.
        cached = _field(root / "sys/fs/cgroup/memory.stat", "inactive_file", unit_bytes=1) or 0
        amounts.append(max(limit - use + cached, 0))
    return min((amount for amount in amounts if amount is not None), default=None)


def _cpu_fields(root: Path) -> dict[str, str]:
    """Of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def _field(path: Path, name: str, *, unit_bytes: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1]) * unit_bytes
    return None


def _first_integer(root: Path, paths: tuple[str, ...]) -> int | None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # a limit that is not set reads "max"
            return int((root / path).read_text())
    return None
