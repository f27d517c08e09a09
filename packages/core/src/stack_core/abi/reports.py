"""A run's report: the panels that packages show in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Fragment", "Panel"]


@dataclass(frozen=True)
class Fragment:
    """A titled part of a page.

    Attributes:
      body: `stack_core.report.markup.Markup`, made by `element`; any other text is escaped, so that it shows as it is.
    """

    title: str
    body: str


@runtime_checkable
class Panel(Protocol):
    """Reads what a run has left in its directory, and shows one thing of it."""

    def __call__(self, directory: Path, config: Mapping[str, Any]) -> Fragment | None:
        """Returns what to show, or None where the run has nothing of it; may be called while the run goes on.

        Args:
          directory: the run's.
          config: the run's resolved config, as its `config.yaml` has it.
        """
        ...
