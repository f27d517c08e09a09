"""Calls of ops without their arrays."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.ops.dispatch.op import Op
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["Implementation", "Request", "op_call"]

Implementation: TypeAlias = str | OpImplementation | Sequence[str | OpImplementation] | None
"""Requested implementations: one, or several in order of preference; None lets core choose."""


@dataclass(frozen=True, eq=False)
class Request:
    """Call of an op without its arrays.

    Attributes:
      op: the op.
      options: static arguments by parameter name.
      implementation: implementations requested by the caller.
      axes: logical axis names of operands, by parameter name.
      names: array parameters, in order.
      structure: pytree structure of the tuple of their arrays; its leaves are the operands.
      noted: callback that receives each plan for the call and returns the plan to use; None if unused.
      is_shared: whether equal calls share this object, and with it everything that is traced for it. Calls with
        unhashable options are not shared.
    """

    op: Op
    options: Mapping[str, Any]
    implementation: Implementation
    axes: LogicalNames | None
    names: tuple[str, ...]
    structure: Any
    noted: Callable[[Any, OpCall], Any] | None = None
    is_shared: bool = False

    def shared(self) -> "Request":
        """Returns the object shared by all equal requests, or this request if it cannot be shared."""
        # A callback belongs to one caller.
        if self.noted is not None:
            return self
        named, axes = self.implementation, self.axes
        # Lists are not hashable.
        named = tuple(named) if isinstance(named, list) else named
        of_operands = None if axes is None else tuple((name, tuple(names)) for name, names in axes.items())
        key = (self.op, tuple(sorted(self.options.items())), named, of_operands, self.names, self.structure)
        try:
            # The registries are part of the key: entries registered later, as in tests, must be found.
            return _shared(*key, registries.ops, registries.tuned_tables)
        except TypeError:  # an option cannot be hashed
            return self

    def replaced(self, **changes: Any) -> "Request":
        """Returns the request with some fields replaced."""
        return dataclasses.replace(self, is_shared=False, **changes).shared()

    def arrays(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the arrays by parameter name."""
        return dict(zip(self.names, jax.tree.unflatten(self.structure, operands), strict=True))

    def call(self, operands: Sequence[Any]) -> OpCall:
        """Returns the forward pass of the call as an `OpCall`, which implementations receive."""
        return op_call(self.op.name, self.arrays(operands), self.options)


@functools.lru_cache(maxsize=4096)
def _shared(
    op: Op, options: Any, implementation: Any, axes: Any, names: tuple[str, ...], structure: Any, *registered: Any
) -> Request:
    of_operands = None if axes is None else dict(axes)
    return Request(op, dict(options), implementation, of_operands, names, structure, is_shared=True)


def op_call(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> OpCall:
    """Returns the forward pass of a call as an `OpCall`, with shapes and dtypes in place of arrays."""
    return OpCall(op, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(arrays)), options)
