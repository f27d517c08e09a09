"""Unrolling of loops over layers, with a separate array for each layer.

Models stack the parameters of their layers, [layers, ...], and loop over them with `lax.scan`, which compiles the body
once. Each iteration slices its layer from the stack, and on CPUs copies it. Decoding is limited by memory bandwidth, so
the copies make it up to six times slower than separate arrays: 46 ms instead of 9 ms per step (40M parameters,
bfloat16, 8 rows, two cores, JAX 0.10.2). A cache that is updated in a loop is copied as well. Arrays that are only
sliced by loops are therefore split in advance, and the loops are unrolled at compile time, without changes to models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from stack_core.programs.jaxprs import bind, consts_of, equations_of, inherit_trace_context, inner, scan_counts
from stack_serve.llm.half_gathers import contains_half_gather, gather_rows

__all__ = ["Layers", "layer_by_layer", "loops_over", "split_layers"]

# JAX renamed the primitive of `jax.jit` from pjit to jit.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Layers:
    """An array [layers, ...] stored as one array per layer.

    Attributes:
      arrays: slices of the array along its first axis.
    """

    arrays: tuple[Any, ...]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the stacked array."""
        return jax.ShapeDtypeStruct((len(self.arrays), *self.arrays[0].shape), self.arrays[0].dtype)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Sequence[Any]) -> "Layers":
        return cls(tuple(arrays))


def loops_over(function: Callable[..., Any], tree: Any, *args: Any) -> tuple[Any, Any]:
    """Finds the arrays of `tree` that `function(tree, *args)` uses only in loops that slice them.

    Args:
      function: function to trace.
      tree, args: pytrees of arrays, or of `jax.ShapeDtypeStruct`.

    Returns:
      Pytree in the structure of `tree` with True for each such array and False for others, and the shapes and dtypes
      of the function's result.
    """
    leaves, structure = jax.tree.flatten(tree)
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(tree, *args)
    variables = equations_of(jaxpr).invars[: len(leaves)]
    looped = _looped(equations_of(jaxpr))
    return jax.tree.unflatten(structure, [looped.get(variable, False) for variable in variables]), result


def split_layers(tree: Any, chosen: Any) -> Any:
    """Splits the arrays of `tree` with True in `chosen` into `Layers`, on the same devices and with the same sharding.

    If the caller drops its reference to `tree`, at most one array is in memory twice.
    """
    leaves, structure = jax.tree.flatten(tree)
    del tree
    leaves.reverse()
    # `pop` drops the last reference to a stacked array, whose memory is freed after its split.
    split = [_split(leaves.pop()) if wanted else leaves.pop() for wanted in jax.tree.leaves(chosen)]
    return jax.tree.unflatten(structure, split)


def layer_by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Transforms a function to accept `Layers` for arrays and to unroll the loops that slice them.

    Results stacked by an unrolled loop are `Layers`. Operations other than loops get the stacked array.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args, is_leaf=_is_layers)
        avals = [leaf.aval if _is_layers(leaf) else leaf for leaf in leaves]
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, avals))
        return jax.tree.unflatten(jax.tree.structure(shape), _run(jaxpr, leaves))

    return run


def _looped(jaxpr: Any) -> dict[Any, bool]:
    """Returns, for each variable used in a jaxpr, whether only loops that slice it use it."""
    found: dict[Any, bool] = {}
    for equation in jaxpr.eqns:
        uses = _uses(equation)
        for variable, looped in zip(equation.invars, uses, strict=True):
            if not isinstance(variable, Literal):
                found[variable] = found.get(variable, True) and looped
    # An array that is also a result is needed in its stacked form.
    for variable in jaxpr.outvars:
        if not isinstance(variable, Literal):
            found[variable] = False
    return found


def _uses(equation: Any) -> list[bool]:
    if equation.primitive.name == "scan":
        sliced = len(equation.invars) - sum(scan_counts(equation))
        return [False] * (len(equation.invars) - sliced) + [True] * sliced
    if equation.primitive.name in _CALLS:
        called = equations_of(inner(equation))
        looped = _looped(called)
        return [looped.get(variable, True) for variable in called.invars]
    return [False] * len(equation.invars)


def _is_layers(value: Any) -> bool:
    return isinstance(value, Layers)


@jax.jit
def _split(array: jax.Array) -> Layers:
    return Layers(tuple(array[index] for index in range(array.shape[0])))


def _stacked(value: Any) -> Any:
    return jnp.stack(value.arrays) if _is_layers(value) else value


def _run(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr equation by equation; arguments may be `Layers`."""
    open_jaxpr = equations_of(jaxpr)
    values: dict[Any, Any] = dict(zip(open_jaxpr.constvars, consts_of(jaxpr), strict=True))
    values |= dict(zip(open_jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in open_jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        with inherit_trace_context(equation):
            results = _results(equation, operands)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in open_jaxpr.outvars]


def _results(equation: Any, operands: Sequence[Any]) -> list[Any]:
    if any(map(_is_layers, operands)):
        if equation.primitive.name == "scan":
            return _unrolled(equation, operands)
        if equation.primitive.name in _CALLS:
            return _run(inner(equation), operands)
    if contains_half_gather(equation):
        return (
            gather_rows(equation, operands) if equation.primitive.name == "gather" else _run(inner(equation), operands)
        )
    return bind(equation, list(map(_stacked, operands)))


def _unrolled(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Unrolls a scan; its stacked results are `Layers`."""
    consts_count, carry_count = scan_counts(equation)
    consts = list(map(_stacked, operands[:consts_count]))
    carry = list(map(_stacked, operands[consts_count : consts_count + carry_count]))
    sliced = operands[consts_count + carry_count :]
    # Under `jit` the body is traced once instead of once per layer.
    body = jax.jit(jaxpr_as_fun(equation.params["jaxpr"]))
    turns = range(equation.params["length"])
    outputs: dict[int, list[Any]] = {}
    for turn in reversed(turns) if equation.params["reverse"] else turns:
        results = body(
            *consts, *carry, *(operand.arrays[turn] if _is_layers(operand) else operand[turn] for operand in sliced)
        )
        carry, outputs[turn] = list(results[:carry_count]), list(results[carry_count:])
    stacked = [
        Layers(tuple(outputs[turn][place] for turn in turns)) for place in range(len(equation.outvars) - carry_count)
    ]
    return [*carry, *stacked]
