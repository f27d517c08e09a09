"""Values that the object of a worker sends to its driver, in batches."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Outbox"]

_MOST_VALUES = 1024  # in a frame
_IDLE_S = 1.0


class Outbox:
    """Sends values in lists on a thread: values that are ready together share a frame, which costs more than a value.

    Args:
      emit: sends a list to the driver.
      extras: returns values to append to a list before it is sent; also called once a second without other values.
    """

    def __init__(self, emit: Callable[[Any], None], extras: Callable[[], Sequence[Any]] = tuple) -> None:
        self._emit, self._extras = emit, extras
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def put(self, value: Any) -> None:
        """Queues a value, which is not None; any thread may call this."""
        self._values.put(value)

    def close(self) -> None:
        """Sends all queued values and stops the thread."""
        self._values.put(None)
        self._thread.join()

    def _run(self) -> None:
        ready: list[Any] = []
        while not ready or ready[-1] is not None:
            ready = []
            with contextlib.suppress(queue.Empty):
                ready.append(self._values.get(timeout=_IDLE_S))
                while ready[-1] is not None and len(ready) < _MOST_VALUES:
                    ready.append(self._values.get_nowait())
            values = [*(each for each in ready if each is not None), *self._extras()]
            if values:
                self._emit(values)
