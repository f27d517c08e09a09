"""`supports` of Tokamax's kernels, without Tokamax."""

import contextlib
from collections.abc import Iterator
from typing import Any

from stack_kernels import from_tokamax

__all__ = ["pretend_tokamax"]


@contextlib.contextmanager
def pretend_tokamax() -> Iterator[None]:
    """Makes `supports` answer as if Tokamax were installed; tracing its kernels still needs it."""
    ours: Any = from_tokamax
    kept = ours.missing
    ours.missing = lambda *modules: None
    try:
        yield
    finally:
        ours.missing = kept
