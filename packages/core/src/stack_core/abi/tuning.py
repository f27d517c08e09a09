"""Measurements that choose among the implementations of ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stack_core.abi.chips import Chip
    from stack_core.abi.ops import OpCall, OpImplementation, TunedChoice

__all__ = ["TunedTable"]


@runtime_checkable
class TunedTable(Protocol):
    """Measurements that choose among the implementations of ops, and their configs."""

    def lookup(
        self,
        call: OpCall,
        chip: Chip,
        *,
        candidates: Mapping[str, OpImplementation],
        forward: TunedChoice | None = None,
    ) -> TunedChoice | None:
        """What to use for one direction of a call on a chip, or None where nothing near enough was measured.

        It is asked while JAX traces, for the forward and then for the backward pass, and reads no arrays.

        Args:
          candidates: what it may choose from, by name: all that support the call, or the one that the caller named.
          forward: what runs forward, when this is the backward pass.
        """
        ...
