"""Kernels inside `jax.shard_map`, where JAX tracks the mesh axes over which each array varies."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.config import _check_vma  # the switch that `jax.shard_map(check_vma=False)` sets while it traces
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from stack_core.ops.building import vary_alike, varying
from stack_core.programs.jaxprs import consts_of

__all__ = ["untyped"]


def untyped(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `kernel(*arrays)` for a kernel written for one device; its results vary over the arrays' mesh axes.

    A Pallas call inside `jax.shard_map` must type its results, and Pallas's interpreter mixes arrays that vary over
    mesh axes with constants that do not, which JAX rejects. Therefore the kernel is traced and lowered with arrays that
    vary over no axis. It must contain no collectives, and its derivative must come from the implementation's backward
    pass.
    """
    leaves, structure = jax.tree.flatten(arrays)
    if not any(map(varying, leaves)):
        return kernel(*arrays)
    with _check_vma(False):
        traced = jax.make_jaxpr(lambda *leaves: kernel(*jax.tree.unflatten(structure, leaves)), return_shape=True)
        closed, shapes = traced(*map(_plain, leaves))
        # The kernel may close over arrays of the enclosing trace, as splash does over the blocks of its mask.
        consts = consts_of(closed)
        count = len(consts)

        def hoisted(*operands: Any) -> list[Any]:
            return jaxpr_as_fun(closed.replace(consts=list(operands[:count])))(*operands[count:])

        operands = (*consts, *leaves)
        jaxpr = jax.make_jaxpr(hoisted)(*map(_plain, operands))
    results = [vary_alike(result, *operands)[0] for result in _untyped_p.bind(*operands, call_jaxpr=jaxpr)]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _plain(x: Any) -> jax.ShapeDtypeStruct:
    # A struct made from a shape and a dtype varies over no mesh axis.
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _evaluated(*arrays: Any, call_jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*arrays)


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, call_jaxpr: Any) -> tuple[list[Any], list[int]]:
    mapped = jax.vmap(functools.partial(_evaluated, call_jaxpr=call_jaxpr), in_axes=tuple(axes))
    with _check_vma(False):
        jaxpr = jax.make_jaxpr(mapped)(*map(_plain, arrays))
    results = _untyped_p.bind(*arrays, call_jaxpr=jaxpr)
    return results, [0] * len(results)


def _lowered(context: Any, *operands: Any, call_jaxpr: Any) -> Any:
    # The operands' own types would bring the mesh axes back.
    plain = context.replace(avals_in=call_jaxpr.in_avals)
    return mlir.lower_fun(_evaluated, multiple_results=True)(plain, *operands, call_jaxpr=call_jaxpr)


class _Untyped(Primitive):
    multiple_results = True

    def is_high(self, *avals: Any, **params: Any) -> bool:
        """False, so that JAX 0.12 lowers a jaxpr with a transposed loop by `_lowered`, and not with the mesh axes."""
        return False


_untyped_p = _Untyped("stack_untyped")
_untyped_p.def_impl(_evaluated)
_untyped_p.def_abstract_eval(lambda *arrays, call_jaxpr: list(call_jaxpr.out_avals))
batching.primitive_batchers[_untyped_p] = _batch
mlir.register_lowering(_untyped_p, _lowered)
