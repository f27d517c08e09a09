"""Products: `dot_general`, convolutions and `ragged_dot`, of any dimension numbers."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.transform import versions, views
from stack_quant.transform.decisions import decide, note, quantized_activation, record
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value

__all__: list[str] = []

_Axes = Sequence[int]


def _dot_general(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    contracted, batch = params["dimension_numbers"]
    name = interpreter.name(equation, "dot_general")
    for value, axes in zip(operands, contracted, strict=True):
        note(interpreter, name, value, axes)
    decision = decide(interpreter, name, operands)
    if not _is_floating(operands) or decision.reason or not (decision.activations or _any_quantized(operands)):
        return _in_float(interpreter, equation, name, operands, decision)
    is_left = operands[0].is_quantized and not operands[1].is_quantized
    order = (1, 0) if is_left else (0, 1)  # the parameter goes to the right
    frees = [_free(value, *axes) for value, axes in zip(operands, zip(contracted, batch, strict=True), strict=True)]
    left, right = (
        _arranged(operands[place].array, batch[place], frees[place], contracted[place], last=position == 0)
        for position, place in enumerate(order)
    )
    of_left, of_right = (operands[place].dtype for place in order)
    if decision.activations:
        left = left if is_quantized(left) else quantized_activation(decision, left, left.ndim - 1)
        right = (
            right
            if is_quantized(right) or _is_parameter(operands[order[1]])
            else quantized_activation(decision, right, right.ndim - 2)
        )
    record(interpreter, equation, name, operands, decision, [left, right])
    dtype = equation.outvars[0].aval.dtype
    result = _product(left, right, len(batch[0]), dtype, params, (of_left, of_right))
    sizes = [[operands[place].shape[axis] for axis in frees[place]] for place in order]
    result = result.reshape(*(operands[0].shape[axis] for axis in batch[0]), *sizes[0], *sizes[1])
    if is_left:
        lead, mine, theirs = len(batch[0]), len(sizes[0]), len(sizes[1])
        swapped = [*range(lead), *range(lead + mine, lead + mine + theirs), *range(lead, lead + mine)]
        result = result.transpose(swapped)
    return [interpreter.new(result, *operands)]


def _is_floating(operands: Sequence[Value]) -> bool:
    return all(jnp.issubdtype(value.dtype, jnp.floating) for value in operands)


def _any_quantized(operands: Sequence[Value]) -> bool:
    return any(value.is_quantized for value in operands)


def _is_parameter(value: Value) -> bool:
    return value.source is not None


def _in_float(
    interpreter: Interpreter, equation: Any, name: str, operands: Sequence[Value], decision: Any
) -> list[Value]:
    arrays = [interpreter.plain(value) for value in operands]
    computed = "dequantized" if _any_quantized(operands) else "float"
    record(interpreter, equation, name, operands, decision, arrays, computed)
    return interpreter.as_it_is(equation, operands)


def _free(value: Value, contracted: _Axes, batch: _Axes) -> list[int]:
    return [axis for axis in range(len(value.shape)) if axis not in {*contracted, *batch}]


def _arranged(array: Any, batch: _Axes, free: _Axes, contracted: _Axes, *, last: bool) -> Any:
    """[*batch, *free, d_in] if `last`, for the left of `ops.linear`; else [*batch, d_in, d_out] for its right."""
    order = [*batch, *free, *contracted] if last else [*batch, *contracted, *free]
    lead, sizes = [array.shape[axis] for axis in batch], [array.shape[axis] for axis in free]
    summed = math.prod(array.shape[axis] for axis in contracted)
    shape = [*lead, *sizes, summed] if last else [*lead, summed, math.prod(sizes)]
    if not is_quantized(array):
        return array.transpose(order).reshape(shape)
    if order != list(range(len(order))):
        array = views.transpose(views.view_of(array), order)
    return array if list(array.shape) == shape else views.reshape(views.view_of(array), shape)


def _product(left: Any, right: Any, batch_axes: int, dtype: Any, params: Any, dtypes: tuple[Any, Any]) -> Any:
    """Left times right over their leading batch axes, as `dtype`."""
    if _is_exacting(params):
        # A precision, or a sharding, is of a product of floats.
        left, right = (ops.dequantize(array, of) for array, of in zip((left, right), dtypes, strict=True))
        lead = tuple(range(batch_axes))
        numbers = (((left.ndim - 1,), (batch_axes,)), (lead, lead))
        options = {"precision": params["precision"], "preferred_element_type": params["preferred_element_type"]}
        return lax.dot_general(left, right, numbers, **options).astype(dtype)
    call = functools.partial(ops.linear, preferred_dtype=dtype)
    for _ in range(batch_axes):
        call = jax.vmap(call)
    left, right = (_mappable(array, batch_axes) for array in (left, right))
    return call(left, right)


def _is_exacting(params: Any) -> bool:
    precision = params["precision"]
    options = precision if isinstance(precision, tuple) else (precision,)
    return params.get("out_sharding") is not None or any(
        option not in (None, lax.Precision.DEFAULT) for option in options
    )


def _mappable(array: Any, axes: int) -> Any:
    if not axes or not is_quantized(array):
        return array
    return views.full_along(views.view_of(array), range(axes))


def _convolution(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    of_left, of_right, _ = params["dimension_numbers"]
    name = interpreter.name(equation, "conv")
    # (batch, features, *space) and (features out, features in, *space): features in are the fastest.
    note(interpreter, name, operands[0], (*of_left[2:], of_left[1]))
    note(interpreter, name, operands[1], (*of_right[2:], of_right[1]))
    decision = decide(interpreter, name, operands)
    if not _is_floating(operands) or decision.reason or not (decision.activations or _any_quantized(operands)):
        return _in_float(interpreter, equation, name, operands, decision)
    left, right = (value.array for value in operands)
    if decision.activations:
        left = left if is_quantized(left) else quantized_activation(decision, left, (*of_left[1:],), tiled=False)
        right = (
            right
            if is_quantized(right) or _is_parameter(operands[1])
            else quantized_activation(decision, right, (*of_right[1:],), tiled=False)
        )
    dtype = equation.outvars[0].aval.dtype
    if _has_integer_convolution(left, right, params):
        record(interpreter, equation, name, operands, decision, [left, right])
        result = _integer_convolution(views.view_of(left), views.view_of(right), params).astype(dtype)
    else:
        computed = "rounded" if is_quantized(left) and is_quantized(right) else "dequantized"
        record(interpreter, equation, name, operands, decision, [left, right], computed)
        floats = [ops.dequantize(array, value.dtype) for array, value in zip((left, right), operands, strict=True)]
        (result,) = versions.bind(equation, floats)
    return [interpreter.new(result, *operands)]


def _has_integer_convolution(left: Any, right: Any, params: Any) -> bool:
    """Whether both are integers with a scale for each of the batch, and for each feature that comes out."""
    if not (is_quantized(left) and is_quantized(right)) or _is_exacting(params) or params["batch_group_count"] != 1:
        return False
    shown = views.view_of(left), views.view_of(right)
    kept = params["dimension_numbers"][0][0], params["dimension_numbers"][1][0]
    return all(
        view.codebook is None
        and view.zero_point is None
        and jnp.issubdtype(view.codes.dtype, jnp.integer)
        and all(views.is_constant_along(view, axis) for axis in range(view.codes.ndim) if axis != mine)
        for view, mine in zip(shown, kept, strict=True)
    )


def _integer_convolution(left: views.View, right: views.View, params: Any) -> Any:
    of_out = params["dimension_numbers"][2]
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")
    sums = lax.conv_general_dilated(
        left.codes.astype(jnp.int8),
        right.codes.astype(jnp.int8),
        **{name: params[name] for name in names},
        preferred_element_type=jnp.int32,
    )

    def spread(scale: Any, axis: int) -> Any:
        shape = [scale.size if place == axis else 1 for place in range(sums.ndim)]
        return scale.astype(jnp.float32).reshape(shape)

    return sums.astype(jnp.float32) * spread(left.scale, of_out[0]) * spread(right.scale, of_out[1])


def _ragged_dot(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    numbers = params["ragged_dot_dimension_numbers"]
    (of_left, of_right), _ = numbers.dot_dimension_numbers
    name = interpreter.name(equation, "ragged_dot")
    note(interpreter, name, operands[0], of_left)
    note(interpreter, name, operands[1], of_right)
    decision = decide(interpreter, name, operands[:2])
    left, right, sizes = operands
    if decision.reason or not right.is_quantized or left.is_quantized or not _is_floating((left, right)):
        return _in_float(interpreter, equation, name, operands, decision)
    x = left.array
    if decision.activations:
        x = quantized_activation(decision, x, of_left[0])
    record(
        interpreter, equation, name, operands[:2], decision, [x, right.array], "rounded" if decision.activations else ""
    )
    x = ops.dequantize(x, left.dtype)
    plain = _is_exacting(params) or params["group_offset"] is not None or not _is_usual(numbers)
    if plain or left.dtype != right.dtype:
        (result,) = versions.bind(equation, [x, interpreter.plain(right), interpreter.plain(sizes)])
    else:
        result = ops.ragged_dot(x, right.array, sizes.array).astype(equation.outvars[0].aval.dtype)
    return [interpreter.new(result, *operands)]


def _is_usual(numbers: Any) -> bool:
    """Whether it is [rows, d_in] times [groups, d_in, d_out]."""
    (contracted, batch), lists = (
        numbers.dot_dimension_numbers,
        (numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions),
    )
    return [tuple(map(tuple, contracted)), tuple(map(tuple, batch)), *map(tuple, lists)] == [
        ((1,), (1,)),
        ((), ()),
        (0,),
        (0,),
    ]


HANDLERS.update({"dot_general": _dot_general, "conv_general_dilated": _convolution, "ragged_dot_general": _ragged_dot})
