"""Turns SIGTERM and Ctrl-C into requests that a loop honours between two steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_requests"]


@dataclass
class StopRequest:
    """The first signal received, or None."""

    received: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.received is not None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes SIGTERM and SIGINT instead of dying of them; a second SIGINT raises KeyboardInterrupt at once.

    Outside the main thread, where Python allows no handlers, the request stays empty.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.received = request.received or signal.Signals(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
