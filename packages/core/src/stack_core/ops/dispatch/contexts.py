"""Snapshot of the contexts that a call depends on, for tracing it again later under the same contexts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.abi.mesh import in_mesh
from stack_core.chips.context import target
from stack_core.ops.dispatch.choosing import exporting
from stack_core.ops.dispatch.tuned import in_use

__all__ = ["Contexts"]

_OURS = (in_mesh, target, in_use, exporting)


@dataclass(frozen=True)
class Contexts:
    """Mesh and rules, target chip, tuned table, export mode, and JAX's default matmul precision and x64 mode."""

    values: tuple[Any, ...]
    precision: Any
    x64: bool

    @classmethod
    def current(cls) -> "Contexts":
        """Returns the current contexts of the caller."""
        values = tuple(context.value for context in _OURS)
        config: Any = jax.config
        return cls(values, config.jax_default_matmul_precision, config.jax_enable_x64)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the contexts that differ from the current values; the first use of a context makes JAX retrace."""
        now = Contexts.current()
        with contextlib.ExitStack() as stack:
            for context, value, current in zip(_OURS, self.values, now.values, strict=True):
                if value is not current:
                    stack.enter_context(context(value))
            if self.precision != now.precision:
                stack.enter_context(jax.default_matmul_precision(self.precision))
            if self.x64 != now.x64:
                stack.enter_context(jax.enable_x64(self.x64))
            yield
