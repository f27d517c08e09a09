"""Panels that packages add to a run's report."""

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
      title: heading.
      body: `stack_core.report.markup.Markup`, made by `element`; any other text is escaped and shown literally.
    """

    title: str
    body: str


@runtime_checkable
class Panel(Protocol):
    """A function that displays one aspect of a run from the files in its directory."""

    def __call__(self, directory: Path, config: Mapping[str, Any]) -> Fragment | None:
        """Returns the panel's content, or None without data for it. May be called during the run.

        Args:
          directory: the run's directory.
          config: the run's resolved config, equal to its `config.yaml`.
        """
        ...
