"""Entry point of op calls: choice and execution of an implementation."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax

from stack_core.chips.jit_context import JitContext
from stack_core.ops.dispatch.backward import called
from stack_core.ops.dispatch.check import check_static
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op
from stack_core.ops.dispatch.request import Implementation, Request
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["dispatch", "recording", "requested", "run"]

recording: Final[JitContext[Any]] = JitContext()
"""Function that replaces `run`, with the same arguments, for calls traced in this context."""


def dispatch(
    op: Op,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    implementation: Implementation,
    axes: LogicalNames | None = None,
) -> Any:
    """Chooses an implementation for a call and runs it.

    Args:
      op: the op.
      arrays: array arguments by parameter name: arrays, pytrees of arrays, or None. Only these have gradients.
      options: static arguments by parameter name.
      implementation: implementations requested by the caller.
      axes: logical axis names of array arguments, by parameter name.

    Raises:
      ArgumentError: an option is an array.
      UnknownName: a requested implementation is not registered.
      UnsupportedOp: no requested (or no registered) implementation supports the call. If only the backward pass is
        unsupported, the error is raised when the call is differentiated.
    """
    request, leaves = requested(op, arrays, options, implementation, axes)
    recorder = recording.value
    if recorder is not None:
        return recorder(request, leaves)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return run(request, leaves)
    return _compiled(request)(*leaves) if request.is_shared else run(request, leaves)


def requested(
    op: Op,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    implementation: Implementation,
    axes: LogicalNames | None = None,
) -> tuple[Request, list[Any]]:
    """Returns a call as a request, and its operands: the leaves of the arrays."""
    check_static(op.name, **options)
    leaves, structure = jax.tree.flatten(tuple(arrays.values()))
    return Request(op, dict(options), implementation, axes, tuple(arrays), structure).shared(), leaves


def run(request: Request, operands: list[Any]) -> Any:
    """Runs the chosen forward pass; derivatives use the chosen backward pass."""
    # Inside a `shard_map`, a gradient has the type of its operand only if all operands vary over the same axes.
    return called(request, vary_alike(operands)[0])


@functools.lru_cache(maxsize=4096)
def _compiled(request: Request) -> Any:
    """Compiles the call, so an op called outside `jax.jit` does not run operation by operation."""
    return jax.jit(lambda *operands: run(request, list(operands)))
