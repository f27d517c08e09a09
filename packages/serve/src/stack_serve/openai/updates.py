"""Transfer of updates from an engine's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from stack_core.abi.generation import GenerationUpdate

__all__ = ["UpdateDispatcher", "UpdateQueue"]

# Bounds the work between two turns of the event loop.
_MOST_AT_ONCE = 64


class UpdateQueue:
    """Queue of the updates of one HTTP request, each with the index of its prompt. Only one task may read it."""

    def __init__(self) -> None:
        self._arrived: list[tuple[int, GenerationUpdate]] = []
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    def put(self, prompt: int, update: GenerationUpdate) -> None:
        self._arrived.append((prompt, update))
        self._wake()

    def close(self) -> None:
        """Closes the queue and wakes its reader."""
        self.closed = True
        self._wake()

    async def take(self) -> list[tuple[int, GenerationUpdate]]:
        """Waits for updates and removes up to 64 of them. Returns an empty list only if the queue is closed."""
        while not self._arrived and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._arrived) <= _MOST_AT_ONCE:
            arrived = self._arrived.copy()
            self._arrived.clear()
            return arrived
        arrived = self._arrived[:_MOST_AT_ONCE]
        del self._arrived[:_MOST_AT_ONCE]
        return arrived

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UpdateDispatcher:
    """Delivers updates to queues on an event loop, with one wake-up for all pending updates.

    An engine emits the updates of a step one after the other. A wake-up for each would cost a system call and
    contention for the interpreter's lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[UpdateQueue, int, GenerationUpdate]] = deque()
        self._is_scheduled = False

    def receiver(self, queue: UpdateQueue, prompt: int) -> Callable[[GenerationUpdate], None]:
        """Returns the callback for the updates of a prompt. The engine may call it from any thread."""

        def receive(update: GenerationUpdate) -> None:
            self._pending.append((queue, prompt, update))
            # No lock: an update is appended before the flag is read, and `_deliver`
            # resets the flag before it looks for updates.
            if not self._is_scheduled:
                self._is_scheduled = True
                # An engine may deliver after the server has ended.
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._deliver)

        return receive

    def _deliver(self) -> None:
        # Reset first: an update that arrives after the loop must schedule another delivery.
        self._is_scheduled = False
        while self._pending:
            queue, prompt, update = self._pending.popleft()
            queue.put(prompt, update)
