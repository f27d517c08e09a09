"""A call of an op: what was chosen for it runs, and is differentiated."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax

from stack_core.abi.jit_context import JitContext
from stack_core.ops.dispatch.backward import called
from stack_core.ops.dispatch.check import check_static
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op
from stack_core.ops.dispatch.request import Implementation, Request
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["dispatch", "recording", "requested", "run"]

recording: Final[JitContext[Any]] = JitContext()
"""Stands in for `run` on what is traced in this context, with its arguments."""


def dispatch(
    op: Op,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    implementation: Implementation,
    axes: LogicalNames | None = None,
) -> Any:
    """Chooses and calls.

    Args:
      arrays: the array arguments by parameter name: arrays, pytrees of arrays, or None. Gradients flow to these only.
      options: the other arguments by parameter name, all static.
      implementation: what the caller named.
      axes: the logical names of the axes of array arguments, by parameter name.

    Raises:
      ArgumentError: an option is an array.
      UnknownName: a named implementation is not registered.
      UnsupportedOp: none of the named, or none at all, supports the call. What only the backward pass lacks is raised
        when the call is differentiated.
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
    """A call, and its operands: the leaves of its arrays."""
    check_static(op.name, **options)
    leaves, structure = jax.tree.flatten(tuple(arrays.values()))
    return Request(op, dict(options), implementation, axes, tuple(arrays), structure).shared(), leaves


def run(request: Request, operands: list[Any]) -> Any:
    """Calls what is chosen, to be differentiated by the backward that is chosen."""
    return called(request, vary_alike(operands)[0])


@functools.lru_cache(maxsize=4096)
def _compiled(request: Request) -> Any:
    """The call as one compiled function: an op that is called by itself is not interpreted operation by operation."""
    return jax.jit(lambda *operands: run(request, list(operands)))
