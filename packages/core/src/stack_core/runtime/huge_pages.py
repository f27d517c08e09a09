"""Huge pages for memory that programs on CPUs allocate anew in each call.

XLA's CPU client allocates the memory of a program's results and temporaries through the C library, and frees it in each
call. With pages of 4 KiB a training step takes a quarter of a million page faults per GiB, and weights of a hundred MB
constantly miss the TLB. If Linux leaves the choice to programs (`madvise`), glibc 2.35 and later request pages of 2 MiB
when a tunable is set. glibc reads the tunable at process start.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TUNABLE", "in_one_block", "is_chosen", "restart_with_huge_pages"]

TUNABLE = "glibc.malloc.hugetlb"
_VARIABLE = "GLIBC_TUNABLES"
_SETTING = "sys/kernel/mm/transparent_hugepage/enabled"
_FIRST_GLIBC = (2, 35)
_ALIGNMENT = 64  # bytes; XLA uses aligned host buffers without a copy


def is_chosen(environ: Mapping[str, str], root: Path = Path("/")) -> bool | None:
    """Returns whether the environment sets the page size; None on systems without that choice."""
    try:
        enabled = (root / _SETTING).read_text()
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):  # not Linux or not glibc
        return None
    if "[madvise]" not in enabled or name != "glibc" or tuple(map(int, version.split("."))) < _FIRST_GLIBC:
        return None
    return TUNABLE in environ.get(_VARIABLE, "")


def restart_with_huge_pages() -> None:
    """Restarts this program with the tunable set; returns if that is impossible or has already happened."""
    # SIGINT is blocked in an interpreter that this function has restarted.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if is_chosen(os.environ) is not False or not sys.executable:
        return
    tunables = [value for value in (os.environ.get(_VARIABLE), f"{TUNABLE}=1") if value]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Until `stack_core.entry.main` runs, an interrupt would only print a traceback of the interpreter's startup.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with contextlib.suppress(OSError):
        environ = {**os.environ, _VARIABLE: ":".join(tunables)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def in_one_block(arrays: Iterable[Any], specs: Sequence[Any]) -> list[Any]:
    """Copies arrays to one CPU device, into a single block of memory that gets huge pages except at its ends.

    A separate array of a few MB would get few of them, since huge pages are aligned to 2 MiB. Arrays of sub-byte
    dtypes are placed separately.

    Args:
      arrays: JAX or NumPy arrays; a reference to each is kept until the next is available.
      specs: shape and dtype of each copy, as `jax.ShapeDtypeStruct`.
    """
    import jax
    import numpy as np

    whole = [_is_byte_sized(each.dtype) for each in specs]
    sizes = [-(-each.size * each.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for each in specs]
    block = np.empty(sum(size for size, in_it in zip(sizes, whole, strict=True) if in_it) + _ALIGNMENT, np.uint8)
    place = -block.ctypes.data % _ALIGNMENT  # NumPy requests huge pages for large arrays itself
    copied = []
    for array, each, size, in_it in zip(arrays, specs, sizes, whole, strict=True):
        if not in_it:
            copied.append(jax.device_put(array))
            continue
        copy = block[place : place + each.size * each.dtype.itemsize].view(each.dtype).reshape(each.shape)
        copy[...] = array
        copied.append(jax.device_put(copy, may_alias=True))
        place += size
    return copied


def _is_byte_sized(dtype: Any) -> bool:
    import jax.numpy as jnp

    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return dtype == jnp.bool_ or kind(dtype).bits % 8 == 0
