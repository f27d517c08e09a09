"""Calls as single jaxpr equations with custom rules for differentiation and vmap.

Equal calls share one jaxpr, and JAX lowers equal equations only once.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from stack_core.ops.dispatch.traced import traced

__all__ = ["Callee", "call", "in_axes", "zero"]

Levels = tuple[tuple[int, tuple[bool, ...]], ...]


class Callee(abc.ABC):
    """Rules of a call. Equal callees must have equal hashes and equal rules."""

    @property
    @abc.abstractmethod
    def is_shared(self) -> bool:
        """True if later calls with an equal callee reuse the traced functions."""

    @property
    def op_name(self) -> str | None:
        """Name of the op whose result and residuals the call returns; None for gradients."""
        return None

    @abc.abstractmethod
    def derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the results and their tangents; zero tangents are `ad.Zero` in arguments and results."""

    @abc.abstractmethod
    def mapped(self, size: int, mapped: Sequence[bool], arguments: Sequence[Any]) -> Sequence[Any]:
        """Returns results mapped along their first axis; arguments are mapped along their first axis if `mapped`."""

    @abc.abstractmethod
    def transposed(self, cotangents: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
        """Returns cotangents of arguments that are `ad.UndefinedPrimal`, and None for all other arguments."""


def call(callee: Callee, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr as one equation with the rules of the callee."""
    return _call_p.bind(*arguments, call_jaxpr=jaxpr, callee=callee, levels=())


def in_axes(mapped: Sequence[bool]) -> tuple[int | None, ...]:
    """Returns `in_axes` of `jax.vmap`: 0 for mapped arguments, else None."""
    return tuple(0 if is_mapped else None for is_mapped in mapped)


def zero(x: Any) -> Any:
    """Returns a symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: Any, callee: Callee, levels: Levels
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Differentiates before mapping, so the gradient's implementation is chosen for a single example."""
    if not levels:
        return callee.derivative(primals, tangents)
    moving = [place for place, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    nonzero: list[int] = []

    def derivative(primals: Sequence[Any], nonzero_tangents: Sequence[Any]) -> tuple[Any, Any]:
        filled = [zero(x) for x in primals]
        for place, tangent in zip(moving, nonzero_tangents, strict=True):
            filled[place] = tangent
        results, found = callee.derivative(primals, filled)
        nonzero[:] = [place for place, t in enumerate(found) if not isinstance(t, ad.Zero)]
        return tuple(results), tuple(found[place] for place in nonzero)

    # Innermost level first, as in `levels`.
    run: Any = derivative
    for _, mapped in levels:
        run = jax.vmap(run, in_axes=(in_axes(mapped), in_axes([mapped[place] for place in moving])))
    results, result_tangents = run(tuple(primals), tuple(tangents[place] for place in moving))
    found = [zero(x) for x in results]
    for place, tangent in zip(nonzero, result_tangents, strict=True):
        found[place] = tangent
    return results, found


def _batch(
    arguments: Sequence[Any], axes: Sequence[Any], *, call_jaxpr: Any, callee: Callee, levels: Levels
) -> tuple[list[Any], list[int]]:
    mapped = tuple(axis is not None for axis in axes)
    moved = [jnp.moveaxis(x, axis, 0) if on else x for x, axis, on in zip(arguments, axes, mapped, strict=True)]
    size = next(x.shape[0] for x, on in zip(moved, mapped, strict=True) if on)
    # The first level uses the rule of the callee, which may fold the axis; further levels map its result.
    inner = call_jaxpr if levels else None
    found = traced(_mapped, callee, inner, size, mapped, operands=moved, is_shared=callee.is_shared)
    levels = (*levels, (size, mapped))
    results = _call_p.bind(*moved, call_jaxpr=found.jaxpr, callee=callee, levels=levels)
    return results, [0] * len(results)


def _mapped(callee: Callee, inner: Any, size: int, mapped: tuple[bool, ...]) -> Any:
    """Returns the function for a mapped call; `inner` is the jaxpr of a call that is already mapped, or None."""
    if inner is None:
        return lambda *arguments: tuple(callee.mapped(size, mapped, arguments))
    return jax.vmap(jaxpr_as_fun(inner), in_axes=in_axes(mapped))


def _transpose(
    cotangents: Sequence[Any], *arguments: Any, call_jaxpr: Any, callee: Callee, levels: Levels
) -> Sequence[Any]:
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]
    if not levels:
        return callee.transposed(cotangents, arguments)
    moving = [place for place, x in enumerate(arguments) if ad.is_undefined_primal(x)]

    def run(*values: Any) -> tuple[Any, ...]:
        filled = list(arguments)
        for place, x in zip(moving, values, strict=True):
            filled[place] = x
        return tuple(jaxpr_as_fun(call_jaxpr)(*filled))

    # A mapped call has no rule: its jaxpr is transposed as any other.
    found = jax.linear_transpose(run, *(arguments[place].aval for place in moving))(tuple(cotangents))
    by_place = dict(zip(moving, found, strict=True))
    return [by_place.get(place) for place in range(len(arguments))]


def _evaluated(*arguments: Any, call_jaxpr: Any, **_: Any) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*arguments)


# `jit` caches by function, so equal jaxprs need one function.
@functools.lru_cache(maxsize=4096)
def _compiled(call_jaxpr: Any) -> Any:
    return jax.jit(jaxpr_as_fun(call_jaxpr))


class _Call(Primitive):
    multiple_results = True

    def to_lojax(self, *arguments: Any, **params: Any) -> list[Any]:
        """Lowers an equation of JAX 0.12 whose jaxpr came from a transposed loop, with references as accumulators."""
        return _compiled(params["call_jaxpr"])(*arguments)


_call_p = _Call("stack_call")
_call_p.def_impl(lambda *arguments, call_jaxpr, **_: _compiled(call_jaxpr)(*arguments))
_call_p.def_abstract_eval(lambda *arguments, call_jaxpr, **_: list(call_jaxpr.out_avals))
ad.primitive_jvps[_call_p] = _jvp
ad.primitive_transposes[_call_p] = _transpose
batching.primitive_batchers[_call_p] = _batch
mlir.register_lowering(_call_p, mlir.lower_fun(_evaluated, multiple_results=True))
