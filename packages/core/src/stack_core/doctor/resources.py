"""Cores, memory, disks and clock of the machine, checked for values that slow work down or make it fail."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from stack_core.abi.findings import Finding
from stack_core.abi.user_cache import user_cache_dir
from stack_core.chips import machine
from stack_core.runtime import huge_pages

__all__ = ["check_cache", "check_clock", "check_cores", "check_memory", "check_pages"]

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_DISK = 5 * _GIB


def check_cores(root: Path = Path("/")) -> Iterator[Finding]:
    """Reports the cores that this process may use, and competing load."""
    usable, present = machine.usable_cores(), os.cpu_count() or 1
    quota = machine.cpu_quota_cores(root)
    found = f"{usable} of {present} cores of {machine.cpu_model(root)}"
    # Thread pools have a thread for each usable core, whatever time the container grants.
    if quota is not None and quota < usable:
        yield Finding(
            "cores",
            "warning",
            f"{found}; the container grants the time of {quota:g}, so threads for {usable} cores wait for each other",
            f"Assign whole cores to the container (docker run --cpuset-cpus) or more time (--cpus={usable}).",
        )
    else:
        yield Finding("cores", "ok", found)
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > present:
        yield Finding(
            "load",
            "warning",
            f"{load:.1f} processes competed for {present} cores during the last minute",
            "Timings are wrong and training is slow until the other processes end; `top` lists them.",
        )


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Reports the total and free memory of the machine or its container."""
    total, available = machine.memory_bytes(root), machine.available_memory_bytes(root)
    if total is None or available is None:
        yield Finding("memory", "note", "the system does not report its free memory")
        return
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
    if available < _LITTLE_MEMORY:
        yield Finding("memory", "warning", found, "End other processes, or give the container more memory.")
    else:
        yield Finding("memory", "ok", found)


def check_pages(environ: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Reports whether memory allocated by CPU programs comes in huge pages, if the process has a choice."""
    is_chosen = huge_pages.is_chosen(environ, root)
    if is_chosen:
        yield Finding("memory pages", "ok", f"GLIBC_TUNABLES has {huge_pages.TUNABLE}")
    elif is_chosen is False:
        yield Finding(
            "memory pages",
            "note",
            "programs on the CPU allocate memory in pages of 4 KiB, which makes a large training step a tenth slower; "
            "`stack` commands that run programs use huge pages by themselves",
            f"Before running your own scripts on the CPU: export GLIBC_TUNABLES={huge_pages.TUNABLE}=1",
        )


def check_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that the folders for cached results are writable and have enough space."""
    folders = {"temporary files": (Path(tempfile.gettempdir()), "TMPDIR")}
    if environ.get("JAX_COMPILATION_CACHE_DIR") and "://" not in environ["JAX_COMPILATION_CACHE_DIR"]:
        folders["JAX's compilations"] = (Path(environ["JAX_COMPILATION_CACHE_DIR"]), "JAX_COMPILATION_CACHE_DIR")
    try:
        folders["stack's cache"] = (user_cache_dir(), "XDG_CACHE_HOME")
    except RuntimeError:
        yield Finding(
            "stack's cache",
            "warning",
            "there is no home directory, so measurements and tokenized data are not cached",
            "Set XDG_CACHE_HOME to a writable folder.",
        )
    for name, (folder, variable) in folders.items():
        yield _folder(name, folder, variable)


def _folder(name: str, folder: Path, variable: str) -> Finding:
    # A missing folder is created later, in its nearest existing parent.
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(name, "warning", f"{folder} is not writable", f"Set {variable} to a writable folder.")
    free = shutil.disk_usage(existing).free
    found = f"{free / _GIB:.1f} GiB are free for {folder}"
    if free < _LITTLE_DISK:
        return Finding(name, "warning", found, f"Free some space, or set {variable} to a folder on another disk.")
    return Finding(name, "ok", found)


def check_clock(now_s: float | None = None) -> Iterator[Finding]:
    """Checks that the clock is not behind: a wrong clock confuses caches and checkpoints, and breaks downloads."""
    now_s = time.time() if now_s is None else now_s
    # The installation wrote this file, so its time has passed.
    if now_s < Path(__file__).stat().st_mtime:
        date = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now_s))
        yield Finding(
            "clock",
            "warning",
            f"the clock says {date} UTC, which is before stack-core was installed",
            "Set the machine's clock.",
        )
