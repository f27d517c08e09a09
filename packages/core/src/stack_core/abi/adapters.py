"""Adapters of low rank as packages exchange them: the factors of each parameter, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Adapters", "AdaptsModels", "LowRankFactors", "ReadsAdapters", "ServesAdapters"]


@dataclass(frozen=True)
class LowRankFactors:
    """The adapter of one parameter W: its products become x W + scale (x down) up.

    Attributes:
      down: [*lead, d_in, rank], where the axes lead are those of layers and experts, each with an adapter of its own.
      up: [*lead, rank, d_out].
      magnitude: DoRA's, [*lead, d_out], the norms of the outputs' weights; or None.
    """

    down: Any
    up: Any
    scale: float
    magnitude: Any = None

    @property
    def rank(self) -> int:
        return self.down.shape[-1]


Adapters = Mapping[str, LowRankFactors]
"""The adapter of a model: factors by the path of the parameter, such as "blocks/0/0/attention/query/kernel"."""


@runtime_checkable
class AdaptsModels(Protocol):
    """A transform that puts adapters on a model, and what its registered class can do besides."""

    def adapters(self, model: Any) -> Adapters:
        """The factors of a model that `apply` gave; only these need values."""
        ...

    def with_adapters(self, model: Any, adapters: Adapters) -> Any:
        """A model that `apply` gave, with other factors; it stays as it is.

        Raises:
          StackError: they are of other parameters, ranks, shapes or scales; names each.
        """
        ...

    @staticmethod
    def section_of(adapters: Adapters) -> Any:
        """The section of a run's config whose transform puts adapters like these on a model."""
        ...


@runtime_checkable
class ReadsAdapters(Protocol):
    """A `GenerativeCheckpoint` whose model takes adapters that are kept apart from it."""

    def read_adapters(self, address: str) -> Adapters:
        """Reads the adapters that a run trained, or that another program wrote, for this model; arrays on the host.

        Paths are those of `parameters`.

        Raises:
          StackError: there are none, or they are those of another model; names the digests or the tensors that differ.
        """
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """An `Engine` whose requests may name adapters, each its own."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that requests may have."""
        ...

    def load_adapter(self, name: str, adapters: str | Adapters) -> None:
        """Takes up an adapter by its address or its factors; one of the same name is replaced for later requests.

        Raises:
          StackError: it cannot be read, is of another model, or of a kind that the engine does not serve.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Lets go of an adapter; requests that were submitted with it end as they would have.

        Raises:
          GenerationError: there is none of this name.
        """
        ...
