"""Large pages for the memory that programs on CPUs take anew at each call.

XLA's CPU client takes the memory of a program's results and temporaries from the C library, and gives it back at each
call. In pages of 4 KiB a training step takes a quarter of a million page faults a GiB, and weights of a hundred MB miss
the processor's table of pages all the time. Where Linux leaves the choice to programs, glibc 2.35 and later ask for
pages of 2 MiB if its tunable says so, which it reads when a process starts.
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
_ALIGNMENT = 64  # of what XLA uses as it is


def is_chosen(environ: Mapping[str, str], root: Path = Path("/")) -> bool | None:
    """Whether the environment says which pages a process is to ask for; None where the system decides that."""
    try:
        enabled = (root / _SETTING).read_text()
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):  # not Linux, or not glibc
        return None
    if "[madvise]" not in enabled or name != "glibc" or tuple(map(int, version.split("."))) < _FIRST_GLIBC:
        return None
    return TUNABLE in environ.get(_VARIABLE, "")


def restart_with_huge_pages() -> None:
    """Starts this program from its beginning with the tunable set; returns where that is not possible, or was done."""
    # Programs that call `stack_core.cli.main` do not pass `stack_core.entry`, which allows interrupts again.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if is_chosen(os.environ) is not False or not sys.executable:
        return
    tunables = [value for value in (os.environ.get(_VARIABLE), f"{TUNABLE}=1") if value]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # From here to `stack_core.cli.main` an interrupt could only end in a traceback of the interpreter's start.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with contextlib.suppress(OSError):
        environ = {**os.environ, _VARIABLE: ":".join(tunables)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def in_one_block(arrays: Iterable[Any], wanted: Sequence[Any]) -> list[Any]:
    """Copies arrays to one CPU, into one block of memory, where all but its ends has large pages.

    An array of a few MB alone has few: a page of 2 MiB is aligned. Arrays of less than a byte an entry stay where they
    are.

    Args:
      arrays: of JAX or NumPy; one is held on to until the next is there.
      wanted: the shape and dtype of each copy, as `jax.ShapeDtypeStruct`.
    """
    import jax
    import numpy as np

    whole = [_is_of_whole_bytes(each.dtype) for each in wanted]
    sizes = [-(-each.size * each.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for each in wanted]
    block = np.empty(sum(size for size, in_it in zip(sizes, whole, strict=True) if in_it) + _ALIGNMENT, np.uint8)
    place = -block.ctypes.data % _ALIGNMENT  # NumPy asks for large pages itself
    copied = []
    for array, each, size, in_it in zip(arrays, wanted, sizes, whole, strict=True):
        if not in_it:
            copied.append(jax.device_put(array))
            continue
        copy = block[place : place + each.size * each.dtype.itemsize].view(each.dtype).reshape(each.shape)
        copy[...] = array
        copied.append(jax.device_put(copy, may_alias=True))
        place += size
    return copied


def _is_of_whole_bytes(dtype: Any) -> bool:
    import jax.numpy as jnp

    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return dtype == jnp.bool_ or kind(dtype).bits % 8 == 0
