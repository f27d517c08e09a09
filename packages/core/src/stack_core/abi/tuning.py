"""Tuned tables: measurements that choose among the implementations of ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stack_core.abi.chips import Chip
    from stack_core.abi.ops import OpCall, OpImplementation, TunedChoice

__all__ = ["TunedTable"]


@runtime_checkable
class TunedTable(Protocol):
    """A table of measurements that chooses implementations of ops and their configs."""

    def lookup(
        self,
        call: OpCall,
        chip: Chip,
        *,
        candidates: Mapping[str, OpImplementation],
        forward: TunedChoice | None = None,
    ) -> TunedChoice | None:
        """Returns the choice for one direction of a call on a chip, or None if no similar call was measured.

        Called while JAX traces, for the forward and then for the backward pass; it reads no arrays.

        Args:
          candidates: implementations to choose from, by name: all implementations that support the call, or only
            the implementation named by the caller.
          forward: the forward pass's choice, during the backward pass.
        """
        ...
