"""What Tokamax's kernels take, where it is not installed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from stack_kernels import from_tokamax

__all__ = ["tokamax_taken_for_granted"]


@contextlib.contextmanager
def tokamax_taken_for_granted() -> Iterator[None]:
    """Lets `supports` answer as where Tokamax is installed; to trace its kernels needs it."""
    ours: Any = from_tokamax
    kept = ours.missing
    ours.missing = lambda *others: None
    try:
        yield
    finally:
        ours.missing = kept
