"""Handlers of products: `dot_general`, convolutions and `ragged_dot`, with any dimension numbers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core import ops
from stack_core.ops.building import is_quantized
from stack_quant.transform import versions, views
from stack_quant.transform.decisions import Decision, decide, note, product_types, quantized_activation, record
from stack_quant.transform.inputs import with_transformed_inputs
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value
from stack_quant.transform.straight_through import rounded, straight_through

__all__ = ["NOT_TRAINED", "linear_call", "mapped", "ragged_call"]

NOT_TRAINED = "it has no quantized gradient"
"""Reason why methods of quantized training leave an operation in float."""

_Axes = Sequence[int]


def _dot_general(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    for place, value in enumerate(operands):
        if value.is_concatenated:
            return [_product_of_parts(interpreter, equation, operands, place)]
    params = equation.params
    contracted, batch = params["dimension_numbers"]
    operands = _with_transforms(interpreter, operands, contracted, batch)
    name = interpreter.name(equation, "dot_general")
    frees = [_free(value, *axes) for value, axes in zip(operands, zip(contracted, batch, strict=True), strict=True)]
    for value, axes, free in zip(operands, contracted, frees, strict=True):
        note(interpreter, name, value, axes, free)
    decision = _decided(interpreter, name, operands, params)
    weights = [interpreter.is_weight(value) for value in operands]
    if not _is_floating(operands) or decision.reason or not (decision.activations or any(weights)):
        return _in_float(interpreter, equation, name, operands, decision)
    is_left = weights == [True, False]
    order = (1, 0) if is_left else (0, 1)  # the parameter goes to the right
    left, right = (
        _arranged(operands[place].array, batch[place], frees[place], contracted[place], last=position == 0)
        for position, place in enumerate(order)
    )
    in_float = [left, right]
    if decision.activations:
        if not weights[order[0]]:
            left, in_float[0] = quantized_activation(interpreter, decision, left, left.ndim - 1, site=f"{name}/left")
        if not _is_parameter(operands[order[1]]):
            right, in_float[1] = quantized_activation(
                interpreter, decision, right, right.ndim - 2, site=f"{name}/right"
            )
    record(interpreter, equation, name, [operands[place] for place in order], decision, [left, right])
    # `ops.linear` has neither a precision nor an output sharding to pass on.
    if _is_exacting(params):
        exact_product = functools.partial(_exact_product, equation, operands, order)
        return [interpreter.new(straight_through(exact_product, [left, right], in_float), *operands)]
    call = linear_call(interpreter, decision, operands[order[1]], equation.outvars[0].aval.dtype, levels=len(batch[0]))
    product = functools.partial(_batched, call, batch_axes=len(batch[0]))
    result = straight_through(product, [left, right], in_float)
    sizes = [[operands[place].shape[axis] for axis in frees[place]] for place in order]
    result = result.reshape(*(operands[0].shape[axis] for axis in batch[0]), *sizes[0], *sizes[1])
    if is_left:
        lead, mine, theirs = len(batch[0]), len(sizes[0]), len(sizes[1])
        # `linear` returns [*batch, *activation axes, *weight axes]; with the weight on the left, the equation wants
        # them swapped.
        swapped = [*range(lead), *range(lead + mine, lead + mine + theirs), *range(lead, lead + mine)]
        result = result.transpose(swapped)
    return [interpreter.new(result, *operands)]


def _with_transforms(
    interpreter: Interpreter, operands: Sequence[Value], contracted: Sequence[_Axes], batch: Sequence[_Axes]
) -> Sequence[Value]:
    for place, other in ((0, 1), (1, 0)):
        shared = zip((*contracted[place], *batch[place]), (*contracted[other], *batch[other]), strict=True)
        operands = with_transformed_inputs(interpreter, operands, other, {place: dict(shared)})
    return operands


def _product_of_parts(interpreter: Interpreter, equation: Any, operands: Sequence[Value], place: int) -> Value:
    """Computes a product with a concatenated operand: part by part, or joined if it sums over the concatenated axis."""

    def product(part: Value) -> Value:
        return interpreter.evaluate(equation, [*operands[:place], part, *operands[place + 1 :]])[0]

    contracted, batch = equation.params["dimension_numbers"]
    frees = [_free(value, *axes) for value, axes in zip(operands, zip(contracted, batch, strict=True), strict=True)]
    value = operands[place]
    if value.array.axis not in frees[place] or equation.params.get("out_sharding") is not None:
        return product(interpreter.joined(value))
    arrays = [interpreter.plain(product(part)) for part in value.parts]
    # Result axes of `dot_general`: batch, free axes of the left operand, free axes of the right.
    before = len(batch[0]) + (len(frees[0]) if place else 0)
    return interpreter.new(lax.concatenate(arrays, before + frees[place].index(value.array.axis)), *operands)


def linear_call(
    interpreter: Interpreter, decision: Decision, right: Value, dtype: Any, *, levels: int = 0
) -> Callable[[Any, Any], Any]:
    """Returns `ops.linear` or, in quantized training, its replacement: a function of the left and the right operand.

    Args:
      right: value of the right operand.
      dtype: dtype of the result.
      levels: number of enclosing calls of `mapped`, each of whose entries draws its own key.
    """
    products = interpreter.resolved.method.products
    if products is None:
        return functools.partial(ops.linear, preferred_dtype=dtype)
    types, key = product_types(interpreter, decision, right), interpreter.draw()

    def call(left: Any, right: Any) -> Any:
        return products.linear(left, right, dtype, types, None if key is None else _of_entry(key, levels))

    return call


def ragged_call(interpreter: Interpreter, decision: Decision, right: Value, *, levels: int = 0) -> Callable[..., Any]:
    """Returns the replacement of `ops.ragged_dot` in quantized training, a function of rows, matrices and group sizes.

    Args:
      levels: see `linear_call`.
    """
    products = interpreter.resolved.method.products
    assert products is not None, "asked only of methods that train products"
    types, key = product_types(interpreter, decision, right), interpreter.draw()

    def call(rows: Any, matrices: Any, sizes: Any) -> Any:
        own = None if key is None else _of_entry(key, levels)
        return products.ragged(rows, matrices, jnp.asarray(sizes), types, own)

    return call


def _of_entry(key: jax.Array, levels: int) -> jax.Array:
    """Returns the key of the current entry of the mapped axes."""
    # Each mapped entry draws its own rounding noise.
    for level in range(levels):
        key = jax.random.fold_in(key, lax.axis_index(_axis_name(level)))
    return key


def mapped(call: Callable[..., Any], axes: Any, level: int) -> Callable[..., Any]:
    """Applies `jax.vmap` to a call, with a named axis; the innermost has level 0."""
    return jax.vmap(call, in_axes=axes, axis_name=_axis_name(level))


def _axis_name(level: int) -> str:
    return f"stack_quant_{level}"


def _decided(interpreter: Interpreter, name: str, operands: Sequence[Value], params: Any) -> Decision:
    """Finds the decision on a product. Training leaves it in float if it requests a precision or an output sharding."""
    decision = decide(interpreter, name, operands)
    if interpreter.resolved.method.products is None or decision.reason or not _is_exacting(params):
        return decision
    return dataclasses.replace(decision, reason="a precision or an output sharding is requested")


def _is_floating(operands: Sequence[Value]) -> bool:
    return all(jnp.issubdtype(value.dtype, jnp.floating) for value in operands)


def _is_parameter(value: Value) -> bool:
    return value.source is not None


def _in_float(
    interpreter: Interpreter, equation: Any, name: str, operands: Sequence[Value], decision: Any
) -> list[Value]:
    arrays = [interpreter.plain(value) for value in operands]
    computed = "dequantized" if any(value.is_quantized for value in operands) else "float"
    record(interpreter, equation, name, operands, decision, arrays, computed)
    return interpreter.as_it_is(equation, operands)


def _free(value: Value, contracted: _Axes, batch: _Axes) -> list[int]:
    return [axis for axis in range(len(value.shape)) if axis not in {*contracted, *batch}]


def _arranged(array: Any, batch: _Axes, free: _Axes, contracted: _Axes, *, last: bool) -> Any:
    """Arranges an operand for `ops.linear`: [*batch, *free, d_in] if `last`, the left, else [*batch, d_in, d_out]."""
    order = [*batch, *free, *contracted] if last else [*batch, *contracted, *free]
    lead, sizes = [array.shape[axis] for axis in batch], [array.shape[axis] for axis in free]
    summed = math.prod(array.shape[axis] for axis in contracted)
    shape = [*lead, *sizes, summed] if last else [*lead, summed, math.prod(sizes)]
    if not is_quantized(array):
        return array.transpose(order).reshape(shape)
    if order != list(range(len(order))):
        array = views.transpose(array, order)
    return array if list(array.shape) == shape else views.reshape(views.view_of(array), shape)


def _exact_product(equation: Any, operands: Sequence[Value], order: Sequence[int], *arranged: Any) -> jax.Array:
    """Runs an equation on the dequantized operands, with its own precision and output sharding.

    Args:
      order: indices of the operands that were arranged as left and right operand.
      arranged: results of `_arranged`.
    """
    contracted, batch = equation.params["dimension_numbers"]
    arrays: list[Any] = [None, None]
    for place, array, last in zip(order, arranged, (True, False), strict=True):
        value = operands[place]
        free = _free(value, contracted[place], batch[place])
        inner = [*free, *contracted[place]] if last else [*contracted[place], *free]
        axes = [*batch[place], *inner]
        split = ops.dequantize(array, value.dtype).reshape([value.shape[axis] for axis in axes])
        arrays[place] = split.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    return versions.bind(equation, arrays)[0]


def _batched(call: Callable[[Any, Any], Any], left: Any, right: Any, *, batch_axes: int) -> Any:
    """Maps a product over the leading batch axes of its operands."""
    for level in range(batch_axes):
        call = mapped(call, 0, level)
    return call(*(_mappable(array, batch_axes) for array in (left, right)))


def _is_exacting(params: Any) -> bool:
    precision = params["precision"]
    options = precision if isinstance(precision, tuple) else (precision,)
    return params.get("out_sharding") is not None or any(
        option not in (None, lax.Precision.DEFAULT) for option in options
    )


def _mappable(array: Any, axes: int) -> Any:
    if not axes or not is_quantized(array):
        return array
    # `vmap` slices scales like codes, so scales need an entry along each mapped axis.
    return views.full_along(views.view_of(array), range(axes))


def _convolution(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    params = equation.params
    of_left, of_right, _ = params["dimension_numbers"]
    name = interpreter.name(equation, "conv")
    # Axes of the operands: (batch, features, *space) and (features out, features in, *space). The contracted axes are
    # listed with the input features last, as the fastest.
    note(interpreter, name, operands[0], (*of_left[2:], of_left[1]))
    note(interpreter, name, operands[1], (*of_right[2:], of_right[1]), of_right[:1])
    decision = _decided(interpreter, name, operands, params)
    weights = [interpreter.is_weight(value) for value in operands]
    if not _is_floating(operands) or decision.reason or not (decision.activations or any(weights)):
        return _in_float(interpreter, equation, name, operands, decision)
    left, right = in_float = [value.array for value in operands]
    if decision.activations:
        if not weights[0]:
            axes = (*of_left[1:],)
            left, in_float[0] = quantized_activation(
                interpreter, decision, left, axes, site=f"{name}/left", tiled=False
            )
        if not _is_parameter(operands[1]):
            axes = (*of_right[1:],)
            right, in_float[1] = quantized_activation(
                interpreter, decision, right, axes, site=f"{name}/right", tiled=False
            )
    dtype = equation.outvars[0].aval.dtype
    products = interpreter.resolved.method.products
    if products is not None:
        record(interpreter, equation, name, operands, decision, [left, right], "rounded")
        types = product_types(interpreter, decision, operands[1])
        result = products.convolution(left, right, params, types, interpreter.draw())
    else:
        is_integer = _has_integer_convolution(left, right, params)
        computed = "rounded" if is_quantized(left) and is_quantized(right) and not is_integer else ""
        record(interpreter, equation, name, operands, decision, [left, right], computed)

        def product(left: Any, right: Any) -> Any:
            if _has_integer_convolution(left, right, params):
                return _integer_convolution(views.view_of(left), views.view_of(right), params).astype(dtype)
            arrays = [ops.dequantize(array, value.dtype) for array, value in zip((left, right), operands, strict=True)]
            return versions.bind(equation, arrays)[0]

        if not is_integer:
            left, right = in_float = [
                rounded(array, floats, value.dtype)
                for array, floats, value in zip((left, right), in_float, operands, strict=True)
            ]
        result = straight_through(product, [left, right], in_float)
    return [interpreter.new(result, *operands)]


def _has_integer_convolution(left: Any, right: Any, params: Any) -> bool:
    """Returns whether a convolution can run on integers: with one scale per batch entry and per output feature."""
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
    # Exact: int8 products summed in int32. The scales are constant over each sum, so they apply afterwards.
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
    if _is_usual(numbers):
        operands = with_transformed_inputs(interpreter, operands, 0, {1: {1: 1}})
    note(interpreter, name, operands[0], of_left)
    kept = [axis for axis in range(len(operands[1].shape)) if axis not in {*of_right, *numbers.rhs_group_dimensions}]
    note(interpreter, name, operands[1], of_right, kept)
    decision = decide(interpreter, name, operands[:2])
    left, right, sizes = operands
    plain = _is_exacting(params) or params["group_offset"] is not None or not _is_usual(numbers)
    plain = plain or left.dtype != right.dtype
    is_trained = interpreter.resolved.method.products is not None
    if is_trained and plain and not decision.reason:
        decision = dataclasses.replace(decision, reason=NOT_TRAINED)
    # `ops.ragged_dot` takes quantized matrices on the right only.
    is_usable = interpreter.is_weight(right) and not interpreter.is_weight(left) and _is_floating((left, right))
    if decision.reason or not is_usable:
        return _in_float(interpreter, equation, name, operands, decision)
    x = in_float = left.array
    if decision.activations:
        x, in_float = quantized_activation(interpreter, decision, x, of_left[0], site=f"{name}/left")
    computed = "rounded" if decision.activations or is_trained else ""
    if is_trained and product_types(interpreter, decision, right).multiplies_codes:
        computed = "quantized"
    record(interpreter, equation, name, operands[:2], decision, [x, right.array], computed)
    x = rounded(x, in_float, left.dtype)
    if is_trained:
        result = ragged_call(interpreter, decision, right)(x, right.array, interpreter.plain(sizes))
        return [interpreter.new(result.astype(equation.outvars[0].aval.dtype), *operands)]
    if plain:
        (result,) = versions.bind(equation, [x, interpreter.plain(right), interpreter.plain(sizes)])
    else:
        result = ops.ragged_dot(x, right.array, sizes.array).astype(equation.outvars[0].aval.dtype)
    return [interpreter.new(result, *operands)]


def _is_usual(numbers: Any) -> bool:
    """Returns whether the product is [rows, d_in] times [groups, d_in, d_out]."""
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
