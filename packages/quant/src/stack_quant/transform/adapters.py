"""Handlers of operations on parameters with adapters: products through the low-rank factors, and rearrangements.

Any other operation uses the merged parameter, and the report notes this.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.ops.building import gate_product, is_quantized, named_residuals
from stack_core.ops.units import OpUnit, as_units, unit_of
from stack_quant.transform import versions, views
from stack_quant.transform.adapted import Adapted
from stack_quant.transform.interpreter import ADAPTED_HANDLERS, HANDLERS, Interpreter, Value

__all__ = ["gated_as_linear_maps"]

_KEPT = ("copy", "copy_p", "name", "pcast", "pvary", "sharding_constraint", "stop_gradient")


def _with_base(operands: Sequence[Value], place: int) -> list[Value]:
    base = dataclasses.replace(operands[place], array=operands[place].array.base)
    return [*operands[:place], base, *operands[place + 1 :]]


def _only_adapted(operands: Sequence[Value]) -> int | None:
    """Returns the index of the operand with adapters, or None unless exactly one operand has adapters."""
    places = [place for place, value in enumerate(operands) if value.is_adapted]
    return places[0] if len(places) == 1 else None


def _sum(base: Value, term: Any) -> Value:
    return dataclasses.replace(base, array=base.array + term.astype(base.array.dtype))


def _dot_general(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Computes x W + s (x D) U."""
    place = _only_adapted(operands)
    if place is None:
        return None
    contracted, batch = equation.params["dimension_numbers"]
    adapted: Adapted = operands[place].array
    other = 1 - place
    frees = [
        [axis for axis in range(len(value.shape)) if axis not in {*summed, *mapped}]
        for value, summed, mapped in zip(operands, contracted, batch, strict=True)
    ]
    if not adapted.takes(contracted[place], frees[place]):
        return None
    (base,) = HANDLERS["dot_general"](interpreter, equation, _with_base(operands, place))
    # `vmap` below maps the factors along the batch axes, along which they may have a single entry.
    adapted = adapted.full_along(batch[place])
    lead, rank = [operands[0].shape[axis] for axis in batch[0]], adapted.down.shape[-1]
    x = interpreter.plain(operands[other])
    kept = [x.shape[axis] for axis in frees[other]]
    x = x.transpose([*batch[other], *frees[other], *contracted[other]]).reshape(*lead, *kept, -1)
    last = len(adapted.shape)  # the axis of the rank
    down = adapted.down.transpose([*batch[place], *contracted[place], *frees[place], last])
    up = adapted.up.transpose([*batch[place], *contracted[place], last, *frees[place]])
    call: Callable[..., Any] = functools.partial(_low_rank, scale=adapted.scale)
    for _ in lead:
        call = jax.vmap(call)
    term = call(x, down.reshape(*lead, -1, rank), up.reshape(*lead, rank, -1))
    term = term.reshape(*lead, *kept, *(adapted.shape[axis] for axis in frees[place]))
    if place == 0:  # the parameter's axes come first
        ahead, behind = len(lead), len(lead) + len(kept)
        term = term.transpose([*range(ahead), *range(behind, term.ndim), *range(ahead, behind)])
    return [_sum(base, term)]


def _low_rank(x: Any, down: Any, up: Any, *, scale: float) -> Any:
    """Computes s (x D) U for x[..., d_in], down[d_in, rank] and up[rank, d_out]."""
    down, up = down.astype(x.dtype), up.astype(x.dtype)
    # The op selects among several adapters; this call has a single adapter.
    return ops.low_rank(x, down[None], up[None], jnp.full(1, scale, jnp.float32))


def _unit(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    unit, place = unit_of(equation), _only_adapted(operands)
    assert unit is not None, "the handler of units alone"
    places = unit.arrays(range(len(operands)))
    if unit.op == "gated_linear_unit" and not operands[places["x"]].is_adapted:
        return gated_as_linear_maps(interpreter, unit, operands)
    weight = {"linear": "weight", "ragged_dot": "rhs"}.get(unit.op)
    if weight is None or place is None or place != places[weight]:
        return None
    adapted: Adapted = operands[place].array
    own = list(range(len(adapted.shape)))
    for axes in reversed(unit.batching):
        if (axis := axes[place]) is not None:
            del own[axis]
    if not adapted.takes(own[-2:-1], own[-1:]):
        return None
    (base,) = HANDLERS["stack_op"](interpreter, equation, _with_base(operands, place))
    adapted = adapted.full_along([axis for axis in range(len(adapted.shape)) if axis not in own[-2:]])
    names = ["x"] if unit.op == "linear" else ["lhs", "group_sizes"]
    given = [places[name] for name in names]
    call: Callable[..., Any] = functools.partial(_OF_UNIT[unit.op], scale=adapted.scale)
    for axes in unit.batching:
        call = jax.vmap(call, in_axes=(axes[place], axes[place], *(axes[at] for at in given)))
    term = call(adapted.down, adapted.up, *(interpreter.plain(operands[at]) for at in given))
    return [_sum(base, term)]


def _linear(down: Any, up: Any, x: Any, *, scale: float) -> Any:
    return _low_rank(x, down[:, 0], up[0].T, scale=scale)


def _ragged_dot(down: Any, up: Any, x: Any, group_sizes: Any, *, scale: float) -> Any:
    """Computes s (x D_g) U_g, where g is the group of each row."""
    down, up = (factor.astype(x.dtype) for factor in (down[:, :, 0], up[:, 0].swapaxes(1, 2)))
    inner = ops.ragged_dot(x, down, group_sizes)
    return ops.ragged_dot(inner * jnp.asarray(scale, x.dtype), up, group_sizes)


_OF_UNIT = {"linear": _linear, "ragged_dot": _ragged_dot}


def gated_as_linear_maps(interpreter: Interpreter, unit: OpUnit, operands: Sequence[Value]) -> list[Value]:
    """Runs a gated linear unit as the program of its two linear maps.

    Adapters, rules and transforms of inputs apply to each of them.
    """

    def gated(*arrays: Any) -> Any:
        given = unit.arrays(arrays)
        gate = ops.linear(given["x"], given["w_gate"], bias=given["bias_gate"])
        up = ops.linear(given["x"], given["w_up"], bias=given["bias_up"])
        return gate_product(*named_residuals("gated_linear_unit", gate, up), **unit.options)

    call: Callable[..., Any] = gated
    for axes in unit.batching:
        call = jax.vmap(call, in_axes=axes)
    # As one equation for each linear map, to which the handlers of linear maps apply.
    with as_units():
        jaxpr = jax.make_jaxpr(call)(*(versions.struct_like(each.array, each.shape, each.dtype) for each in operands))
    return interpreter.run(jaxpr, operands)


def _transpose(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    (value,), permutation = operands, equation.params["permutation"]
    source = value.source and value.source.permuted(permutation)
    return [dataclasses.replace(value, array=value.array.transpose(permutation), source=source)]


def _reshape(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    shape = equation.outvars[0].aval.shape
    array = operands[0].array.reshape(shape)
    source = operands[0].source and operands[0].source.reshaped(shape)
    return None if array is None else [dataclasses.replace(operands[0], array=array, source=source)]


def _cast(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    (base,) = HANDLERS["convert_element_type"](interpreter, equation, _with_base(operands, 0))
    # A cast to integers is not linear, so the adapters must be merged before.
    if not jnp.issubdtype(base.dtype, jnp.floating):
        return None
    return [dataclasses.replace(base, array=dataclasses.replace(operands[0].array, base=base.array))]


def _keep(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Applies an equation that leaves entries unchanged, such as a sharding constraint, to the base."""
    adapted = operands[0].array
    if is_quantized(adapted.base):
        base = views.on_codes(views.view_of(adapted.base), lambda codes: versions.bind(equation, [codes])[0])
    else:
        (base,) = versions.bind(equation, [adapted.base])
    return [dataclasses.replace(operands[0], array=dataclasses.replace(adapted, base=base))]


ADAPTED_HANDLERS.update(
    {
        "dot_general": _dot_general,
        "stack_op": _unit,
        "transpose": _transpose,
        "reshape": _reshape,
        "squeeze": _reshape,
        "expand_dims": _reshape,
        "convert_element_type": _cast,
        **dict.fromkeys(_KEPT, _keep),
    }
)
