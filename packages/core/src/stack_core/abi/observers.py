"""Observers: receivers of a run's events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stack_core.abi.events import Event

__all__ = ["Observer", "ObservesInLoop"]


@runtime_checkable
class Observer(Protocol):
    """A receiver of all events of a run, on the host and in order."""

    def observe(self, event: Event) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ObservesInLoop(Observer, Protocol):
    """An observer that the training loop calls between its steps, for instance to start a trace or read a clock.

    Its calls have no time limit: they must not wait for a disk, a network or a terminal.
    """

    @property
    def in_loop(self) -> Literal[True]: ...
