"""Low-rank adapters in the form that packages exchange: factors of each parameter, separate from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Adapters", "AdaptsModels", "ExpectsAdapters", "LowRankFactors", "ReadsAdapters"]


@dataclass(frozen=True)
class LowRankFactors:
    """The adapter of one parameter W: products become x W + scale (x down) up.

    Attributes:
      down: [*lead, d_in, rank]; the leading axes are layers and experts, each with its own adapter.
      up: [*lead, rank, d_out].
      scale: factor of the low-rank product.
      magnitude: norms of the output weights for DoRA, [*lead, d_out], or None.
    """

    down: Any
    up: Any
    scale: float
    magnitude: Any = None

    @property
    def rank(self) -> int:
        return self.down.shape[-1]


Adapters = Mapping[str, LowRankFactors]
"""The adapters of a model: factors by parameter path, such as "blocks/0/0/attention/query/kernel"."""


@runtime_checkable
class AdaptsModels(Protocol):
    """A transform that adds adapters to a model."""

    def adapters(self, model: Any) -> Adapters:
        """Returns the factors of a model that `apply` returned; only the factors need values."""
        ...

    def with_adapters(self, model: Any, adapters: Adapters) -> Any:
        """Returns a copy of a model that `apply` returned, with its factors replaced.

        Raises:
          StackError: the adapters have other parameters, ranks, shapes or scales; names each.
        """
        ...

    @staticmethod
    def section_of(adapters: Adapters) -> Any:
        """Returns the run config section whose transform creates adapters like these."""
        ...


@runtime_checkable
class ReadsAdapters(Protocol):
    """A `GenerativeCheckpoint` whose model accepts adapters that are stored separately."""

    def read_adapters(self, address: str) -> Adapters:
        """Reads adapters for this model, as host arrays, from a run or another program's files.

        The keys are paths as in `parameters`.

        Raises:
          StackError: there are no adapters, or they belong to another model; names the digests or tensors that differ.
        """
        ...


@runtime_checkable
class ExpectsAdapters(Protocol):
    """A `GenerativeCheckpoint` whose engine compiles its programs for adapters that `load_adapter` will load.

    Attributes:
      adapter_paths: paths of the adapted parameters.
      adapter_rank: maximum rank.
    """

    adapter_paths: tuple[str, ...]
    adapter_rank: int
