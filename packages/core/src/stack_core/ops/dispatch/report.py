"""Warnings about what plugins do wrong while ops are chosen: each is reported once in a process."""

import threading
import warnings

__all__ = ["warn_once"]

_reported: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def warn_once(*key: str, message: str) -> None:
    """Warns unless something was reported under this key before, in whatever words."""
    with _lock:
        if key in _reported:
            return
        _reported.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
