"""Warnings during the choice of implementations, each issued once per process."""

import threading
import warnings

__all__ = ["warn_once"]

_reported: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def warn_once(*key: str, message: str) -> None:
    """Issues a warning unless this process already issued one with the same key, even with another message."""
    with _lock:
        if key in _reported:
            return
        _reported.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
