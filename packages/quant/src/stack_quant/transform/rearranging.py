"""Equations that move, cut or cast a value and compute nothing: they act on a quantized array as on any other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from stack_quant.transform import versions, views
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value
from stack_quant.transform.parts import Concatenated
from stack_quant.transform.provenance import Source

__all__: list[str] = []

_KEPT = ("copy", "copy_p", "name", "pcast", "pvary", "sharding_constraint", "stop_gradient")


def _result(
    interpreter: Interpreter, equation: Any, operands: Sequence[Value], source: Source | None, view: Any
) -> list[Value]:
    """The result; `view` is a function that rearranges the first operand where it is quantized."""
    value = operands[0]
    if value.is_quantized and source is not None:
        return [dataclasses.replace(value, array=view(views.view_of(value.array)), source=source)]
    (result,) = interpreter.as_it_is(equation, operands)
    return [dataclasses.replace(result, source=source)]


def _transpose(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    permutation = equation.params["permutation"]
    if operands[0].is_concatenated:
        parts = [interpreter.evaluate(equation, [part])[0] for part in operands[0].parts]
        return [_concatenated(parts, tuple(permutation).index(operands[0].array.axis))]
    source = operands[0].source.permuted(permutation) if operands[0].source else None
    return _result(interpreter, equation, operands, source, lambda view: views.transpose(view, permutation))


def _reshape(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    shape = equation.outvars[0].aval.shape
    source = operands[0].source.reshaped(shape) if operands[0].source else None
    return _result(interpreter, equation, operands, source, lambda view: views.reshape(view, shape))


def _slice(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    start, limit, strides = (equation.params[name] for name in ("start_indices", "limit_indices", "strides"))
    strides = strides or [1] * len(start)
    source = operands[0].source.resized(equation.outvars[0].aval.shape) if operands[0].source else None
    return _result(interpreter, equation, operands, source, lambda view: views.slice_(view, start, limit, strides))


def _dynamic_slice(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    sizes = equation.params["slice_sizes"]
    source = operands[0].source.resized(sizes) if operands[0].source else None
    starts = [interpreter.plain(start) for start in operands[1:]]
    return _result(interpreter, equation, operands, source, lambda view: views.dynamic_slice(view, starts, sizes))


def _broadcast(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    source = operands[0].source
    if source is not None:
        places = [axes.index(axis) if axis in axes else None for axis in range(len(shape))]
        source = source.permuted(places)
    return _result(interpreter, equation, operands, source, lambda view: views.broadcast(view, shape, axes))


def _split(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    value, axis = operands[0], equation.params["axis"]
    shapes = [result.aval.shape for result in equation.outvars]
    if not value.is_quantized:
        results = interpreter.as_it_is(equation, operands)
        sources = [None if value.source is None else value.source.resized(shape) for shape in shapes]
        return [dataclasses.replace(result, source=source) for result, source in zip(results, sources, strict=True)]
    parts: list[Value] = []
    view, start = views.view_of(value.array), 0
    for shape in shapes:
        begin = [start if place == axis else 0 for place in range(len(shape))]
        end = [start + size if place == axis else size for place, size in enumerate(shape)]
        part = views.slice_(view, begin, end, [1] * len(shape))
        parts.append(dataclasses.replace(value, array=part, source=value.source and value.source.resized(shape)))
        start += shape[axis]
    return parts


def _concatenate(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Parameters stay what they are where a rule may be for one of them, and nothing else is among the operands."""
    known = interpreter.treatment.of_path
    ruled = any(
        value.is_adapted or not known or value.source.path in known for value in operands if value.source is not None
    )
    if not ruled or any(value.from_data or not jnp.issubdtype(value.dtype, jnp.floating) for value in operands):
        return interpreter.as_it_is(equation, operands)
    return [_concatenated(operands, equation.params["dimension"])]


def _concatenated(parts: Sequence[Value], axis: int) -> Value:
    sources, dtype = tuple(part.source for part in parts), parts[0].dtype
    array = Concatenated(tuple(part.array for part in parts), axis, sources, jnp.dtype(dtype).name)
    return Value(array, None, False, dtype, tuple(dict.fromkeys(path for part in parts for path in part.paths)))


def _cast(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    value, dtype = operands[0], jnp.dtype(equation.params["new_dtype"])
    if value.is_concatenated:
        parts = [interpreter.evaluate(equation, [part])[0] for part in value.parts]
        return [_concatenated(parts, value.array.axis)]
    if value.is_quantized and jnp.issubdtype(dtype, jnp.floating):
        return [dataclasses.replace(value, dtype=dtype)]
    (result,) = interpreter.as_it_is(equation, operands)
    return [dataclasses.replace(result, source=value.source)]


def _keep(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """What says something about an array and leaves it as it is."""

    def kept(view: views.View) -> views.View:
        return views.on_codes(view, lambda codes: versions.bind(equation, [codes])[0])

    return _result(interpreter, equation, operands, operands[0].source, kept)


HANDLERS.update(
    {
        "transpose": _transpose,
        "reshape": _reshape,
        "squeeze": _reshape,
        "expand_dims": _reshape,
        "slice": _slice,
        "split": _split,
        "concatenate": _concatenate,
        "dynamic_slice": _dynamic_slice,
        "broadcast_in_dim": _broadcast,
        "convert_element_type": _cast,
        **dict.fromkeys(_KEPT, _keep),
    }
)
