"""Blocking calls on threads that neither queue before their time limit nor outlive the process."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonExecutor", "Threads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonExecutor(ThreadPoolExecutor):
    """Starts a daemon thread for each call.

    The threads of a `ThreadPoolExecutor` are joined when the process exits, so that one call that hangs keeps it alive.
    It is a subclass because event loops take no other default executor.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        found = Future[_T]()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # it belongs to the caller, whatever it is
                found.set_exception(error)
            else:
                found.set_result(result)

        threading.Thread(target=run, name="call", daemon=True).start()
        return found


class Threads:
    """Runs blocking calls for event loops, at most `at_once` of each loop at a time.

    A call that exceeds its time gives up its place, though nothing can end its thread.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._executor = at_once, DaemonExecutor()
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def run(self, call: Callable[[], _T], *, timeout_s: float | None = None) -> _T:
        """Runs a call once there is a place; its time limit counts from then on.

        Raises:
          TimeoutError: it did not end in time.
        """
        loop = asyncio.get_running_loop()
        async with self._places.setdefault(loop, asyncio.Semaphore(self._at_once)), asyncio.timeout(timeout_s):
            return await loop.run_in_executor(self._executor, call)
