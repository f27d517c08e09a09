"""The ability of an engine to report on the engines of which it consists."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stack_core.abi.generation import EngineStats

__all__ = ["ReportsEngines"]


@runtime_checkable
class ReportsEngines(Protocol):
    """An engine made of several, with the statistics of each."""

    def engine_stats(self) -> Sequence[EngineStats | None]:
        """Returns the statistics of each engine; None for an engine that is not running."""
        ...

    @property
    def running_engines(self) -> int:
        """Number of engines that run, that is, are neither starting again nor given up."""
        ...
