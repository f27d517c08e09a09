"""Threads for blocking calls whose time limit excludes queueing and which cannot keep the process alive."""

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

    `ThreadPoolExecutor` joins its threads when the process exits, so one hanging call would keep the process alive.
    This is a subclass only because event loops accept no other type as default executor.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        found = Future[_T]()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # raised again by the caller
                found.set_exception(error)
            else:
                found.set_result(result)

        threading.Thread(target=run, name="call", daemon=True).start()
        return found


class Threads:
    """Runs blocking calls for event loops, at most `at_once` at a time per loop.

    A call that exceeds its time limit frees its slot, although its thread cannot be stopped.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._executor = at_once, DaemonExecutor()
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def run(self, call: Callable[[], _T], *, timeout_s: float | None = None) -> _T:
        """Runs a call as soon as a slot is free; the time limit starts then.

        Raises:
          TimeoutError: the call exceeds the limit.
        """
        loop = asyncio.get_running_loop()
        # One semaphore per event loop, because asyncio's primitives cannot be shared between loops.
        async with self._places.setdefault(loop, asyncio.Semaphore(self._at_once)), asyncio.timeout(timeout_s):
            return await loop.run_in_executor(self._executor, call)
