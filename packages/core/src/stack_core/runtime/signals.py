"""Deferred SIGTERM and Ctrl-C, which a loop handles between two steps."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_requests"]


@dataclass
class StopRequest:
    """A request to stop; true once a signal was received.

    Attributes:
      received: the first signal received while signals are deferred, or None.
      deferred: whether signals wait for the loop; otherwise they act immediately, as without `stop_requests`.
    """

    received: signal.Signals | None = None
    deferred: bool = True

    def __bool__(self) -> bool:
        return self.received is not None


@contextlib.contextmanager
def stop_requests(*, deferred: bool = True) -> Iterator[StopRequest]:
    """Records SIGTERM and SIGINT instead of ending the process; a second SIGINT raises KeyboardInterrupt immediately.

    Outside the main thread, where Python allows no handlers, the request stays empty.

    Args:
      deferred: False lets signals act immediately until `StopRequest.deferred` is set.
    """
    request = StopRequest(deferred=deferred)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (request or not request.deferred):
            raise KeyboardInterrupt
        if not request.deferred:
            # The process ends by the signal itself, which the exit status then shows.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.received = request.received or signal.Signals(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
