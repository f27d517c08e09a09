"""Updates from a thread of the engine's to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from stack_core.abi.generation import GenerationUpdate

__all__ = ["Mailbox", "PostOffice"]

_MOST_AT_ONCE = 64


class Mailbox:
    """The updates of one HTTP request, each with the number of its prompt; read by one task."""

    def __init__(self) -> None:
        self._arrived: list[tuple[int, GenerationUpdate]] = []
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    def put(self, prompt: int, update: GenerationUpdate) -> None:
        self._arrived.append((prompt, update))
        self._wake()

    def close(self) -> None:
        """Ends the waiting for more."""
        self.closed = True
        self._wake()

    async def take(self) -> list[tuple[int, GenerationUpdate]]:
        """The next that arrived, up to 64: at least one update, unless the mailbox was closed."""
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


class PostOffice:
    """Carries updates to mailboxes on an event loop, which is woken once for all that wait to be carried.

    An engine hands out the updates of a step one after the other; waking the loop for each would cost a system call
    and a fight for the interpreter's lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Mailbox, int, GenerationUpdate]] = deque()
        self._loop_knows = False

    def receiver(self, mailbox: Mailbox, prompt: int) -> Callable[[GenerationUpdate], None]:
        """What an engine is to call with the updates of a prompt, from any thread."""

        def receive(update: GenerationUpdate) -> None:
            self._posted.append((mailbox, prompt, update))
            if not self._loop_knows:
                self._loop_knows = True
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._carry)

        return receive

    def _carry(self) -> None:
        self._loop_knows = False  # before the first is taken, so that none is left behind
        while self._posted:
            mailbox, prompt, update = self._posted.popleft()
            mailbox.put(prompt, update)
