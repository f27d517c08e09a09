"""Programs for derivatives of a call: the reference's tangent and the chosen backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from stack_core.abi.errors import UnsupportedOp
from stack_core.ops.dispatch.forward import Forward
from stack_core.ops.dispatch.plain import plain
from stack_core.ops.dispatch.splitting import like
from stack_core.ops.dispatch.traced import traced
from stack_core.programs.jaxprs import equations_of

__all__ = ["backward_pass", "program", "pruned", "read_by_tangent", "reference_tangent"]

_Function = Callable[..., Sequence[Any]]


def program(make: Any, forward: Forward, moving: tuple[int, ...], pool: Sequence[Any], more: Sequence[Any]) -> Any:
    """Returns the jaxpr of `make(forward, moving)`, a function of (pool, more)."""
    operands = (list(pool), list(more))
    return traced(make, forward, moving, operands=operands, is_shared=forward.request.is_shared).jaxpr


@functools.lru_cache(maxsize=8192)
def pruned(with_consts: Any, count: int, required: frozenset[int]) -> tuple[Any, tuple[int, ...]]:
    """Drops unused operands among the first `count` of a jaxpr.

    Args:
      with_consts: the jaxpr, closed over its constants.
      count: number of leading operands that may be dropped.
      required: indices of operands that are never dropped.

    Returns:
      The jaxpr, and the indices of the remaining operands below `count`.
    """
    inner = equations_of(with_consts)
    needs = [place >= count or place in required for place in range(len(inner.invars))]
    pruned, is_used = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), needs)
    closed = with_consts.replace(jaxpr=pruned) if inner is not with_consts else pruned
    return closed, tuple(place for place in range(count) if is_used[place])


def read_by_tangent(forward: Forward, moving: tuple[int, ...]) -> frozenset[int]:
    """Returns the indices of the operands that the reference's tangent may read, without tracing it."""
    operands = set(range(forward.operands))
    if len(moving) == 1 and forward.names[moving[0]] in forward.request.op.linear_in:
        operands -= set(moving)
    return frozenset(operands)


def reference_tangent(forward: Forward, moving: Sequence[int]) -> _Function:
    """Returns the tangent of the reference as a function of (operands, tangents of the `moving` operands)."""
    request = forward.request

    def reference(*operands: Any) -> list[Any]:
        arguments = {**request.arrays(operands), **request.options}
        return jax.tree.leaves(request.op.reference(**arguments, requested=frozenset())[0])

    def tangent(operands: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        def of_moving(*some: Any) -> list[Any]:
            filled = list(operands)
            for place, operand in zip(moving, some, strict=True):
                filled[place] = operand
            return reference(*filled)

        # Forward mode cannot pass through a `custom_vjp`.
        with plain():
            return jax.jvp(of_moving, tuple(operands[i] for i in moving), tuple(tangents))[1]

    return tangent


def backward_pass(forward: Forward, moving: Sequence[int]) -> _Function:
    """Returns the chosen backward pass, from (pool, cotangents of the result) to gradients of `moving` operands."""
    request, chosen = forward.request, forward.plan.backward
    assert not isinstance(chosen, UnsupportedOp) and chosen.implementation.backward is not None
    run = chosen.implementation.backward
    requested = frozenset(forward.names[i] for i in moving)

    def gradients(pool: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        arrays, outputs, residuals = forward.read(pool)
        of_result = jax.tree.unflatten(forward.structure, cotangents)
        found = run(arrays, request.options, outputs, residuals, of_result, requested=requested, **chosen.keywords)
        leaves: list[Any] = []
        for name, array in arrays.items():
            structure = jax.tree.structure(array)
            gradient = found.get(name) if structure.num_leaves else None
            # `flatten_up_to` keeps None at leaves without a gradient, such as the codes of a quantized operand.
            leaves += [None] * structure.num_leaves if gradient is None else structure.flatten_up_to(gradient)
        of_moving = [(leaves[i], pool[i]) for i in moving]
        return [jnp.zeros_like(x) if gradient is None else gradient.astype(x.dtype) for gradient, x in of_moving]

    if chosen.split is None:
        return gradients
    split = chosen.split

    def split_gradients(pool: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        of_outputs = forward.pool_axes[forward.operands : forward.operands + forward.outputs]
        of_all = [of_one or "" for of_one in (*forward.pool_axes, *of_outputs)]
        results = [(forward.pool_axes[i] or "", forward.shapes[i].shape) for i in moving]

        def local(*arrays: Any) -> list[Any]:
            return gradients(arrays[: len(pool)], arrays[len(pool) :])

        found = split.run(local, (*pool, *cotangents), of_all, results)
        return [like(x, pool[i]) for x, i in zip(found, moving, strict=True)]

    return split_gradients
