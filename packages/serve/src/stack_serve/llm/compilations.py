"""Counter of compilations per thread, which must stay at zero in a warmed-up server."""

import threading
from collections import Counter

import jax

__all__ = ["count_thread_compilations"]

_EVENT = "/jax/core/compile/backend_compile_duration"

_of_thread: Counter[int] = Counter()
_listening = threading.Event()


def count_thread_compilations() -> int:
    """Counts the programs that this thread compiled, or loaded from the compilation cache, since the first call."""
    # JAX calls every registered listener, so a second one would count each compilation twice.
    if not _listening.is_set():
        _listening.set()
        jax.monitoring.register_event_duration_secs_listener(_count)
    # Thread identifiers are reused, so callers subtract a count that they read before.
    return _of_thread[threading.get_ident()]


def _count(event: str, duration_secs: float, **_: object) -> None:
    if event == _EVENT:
        _of_thread[threading.get_ident()] += 1
