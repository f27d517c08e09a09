"""Resources of this machine and the part that this process may use, read from the system without JAX."""

import contextlib
import ctypes
import gc
import os
import platform
import sys
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "cpu_flags",
    "cpu_model",
    "cpu_quota_cores",
    "free_zeros",
    "give_memory_back",
    "memory_bytes",
    "resident_bytes",
    "usable_cores",
]

# Limits of a container: cgroup version 2, then version 1. Outside of a container the files do not exist.
_MEMORY_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_MEMORY_USES = ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes")
_MADV_DONTNEED = 4
_CPU_NUMBERS = {"family": "cpu family", "model": "model"}


def cpu_model(root: Path = Path("/")) -> str:
    """Returns the CPU's name with its family and model; on systems that report no name, the CPU's architecture.

    Virtual machines may shorten the name to a whole series of CPUs; family and model then still identify the CPU.
    """
    fields = _cpu_fields(root)
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = ", ".join(f"{name} {fields[key]}" for name, key in _CPU_NUMBERS.items() if key in fields)
    return f"{fields['model name']} ({numbers})" if numbers else fields["model name"]


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Returns the CPU's features by their Linux names, such as "amx_bf16"; empty if the system does not report them."""
    return frozenset(_cpu_fields(root).get("flags", "").split())


def usable_cores() -> int:
    """Returns the number of cores that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """Returns the CPU time that a container grants, in cores, or None if it sets no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota_us) / int(period_us)  # raises ValueError for "max", which means no limit
    with contextlib.suppress(OSError, ValueError):
        quota_us = (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
        period_us = (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return int(quota_us) / int(period_us) if int(quota_us) > 0 else None
    return None


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the size of the machine's memory, or the container's limit if it is lower; None when unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min(total, _first_integer(root, _MEMORY_LIMITS) or total)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Returns the resident memory of this process; None when the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def give_memory_back() -> None:
    """Collects garbage, and returns freed memory to the system."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Returns freed memory that glibc keeps for reuse to the system; without glibc, does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_zeros(address: int, size_bytes: int) -> None:
    """Frees the physical memory behind zeros, which read as zeros and take memory again when they are written.

    Only whole pages within the range are freed, and only on Linux.

    Args:
      address: first byte of private memory that this process has allocated and that contains only zeros.
    """
    if not sys.platform.startswith("linux"):
        return
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    start = -(-address // page_bytes) * page_bytes
    whole_bytes = (address + size_bytes - start) // page_bytes * page_bytes
    if whole_bytes > 0:
        # A refusal, such as for locked memory, leaves the zeros in place.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole_bytes), _MADV_DONTNEED)


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that a new process can use without swapping; None when unknown."""
    amounts = [_field(root / "proc/meminfo", "MemAvailable:", unit_bytes=1024)]
    limit, use = _first_integer(root, _MEMORY_LIMITS), _first_integer(root, _MEMORY_USES)
    if limit is not None and use is not None:
        # A container's usage includes cached files, which the system drops when memory is needed.
        cached = _field(root / "sys/fs/cgroup/memory.stat", "inactive_file", unit_bytes=1) or 0
        amounts.append(max(limit - use + cached, 0))
    return min((amount for amount in amounts if amount is not None), default=None)


def _cpu_fields(root: Path) -> dict[str, str]:
    """Returns the fields of the first processor in /proc/cpuinfo."""
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
        with contextlib.suppress(OSError, ValueError):  # an unset limit reads "max"
            return int((root / path).read_text())
    return None
