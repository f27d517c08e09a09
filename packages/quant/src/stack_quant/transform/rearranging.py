"""Handlers of equations that move, slice or cast a value: they keep a quantized array quantized."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from stack_core.ops.building import is_quantized
from stack_quant.transform import versions, views
from stack_quant.transform.adapted import Adapted
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value
from stack_quant.transform.parts import Concatenated
from stack_quant.transform.provenance import Source

__all__: list[str] = []

_KEPT = ("copy", "copy_p", "name", "pcast", "pvary", "sharding_constraint", "stop_gradient")


def _result(
    interpreter: Interpreter, equation: Any, operands: Sequence[Value], source: Source | None, view: Any
) -> list[Value]:
    """Computes the result of an equation; `view` rearranges the first operand if it is quantized."""
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
    if operands[0].is_quantized and source is not None:
        return [dataclasses.replace(operands[0], array=views.transpose(operands[0].array, permutation), source=source)]
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
    """Keeps concatenated parameters as parts if all operands are parameters and a rule may apply to any operand."""
    known = interpreter.resolved.of_path
    # Without a plan, as in the first survey, any parameter may have a rule.
    ruled = any(
        value.is_adapted or not known or value.source.path in known for value in operands if value.source is not None
    )
    if not ruled or any(value.from_data or not jnp.issubdtype(value.dtype, jnp.floating) for value in operands):
        return interpreter.as_it_is(equation, operands)
    stacked = _stacked(interpreter, operands, equation.params["dimension"])
    return [_concatenated(operands, equation.params["dimension"]) if stacked is None else stacked]


def _stack(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    axis = equation.params["axis"]
    if any(value.source is None or value.is_concatenated for value in operands):
        return interpreter.as_it_is(equation, operands)
    rows = [_with_axis(value, axis) for value in operands]
    stacked = _stacked(interpreter, rows, axis)
    if stacked is not None:
        return [stacked]
    if any(value.is_quantized for value in operands):
        reason = "the parameters that are stacked are not quantized alike"
        interpreter.left(equation, operands, interpreter.name(equation, "stack"), reason)
    return interpreter.as_it_is(equation, operands)


def _with_axis(value: Value, axis: int) -> Value:
    """Returns a parameter with a new axis of one entry."""
    shape = (*value.shape[:axis], 1, *value.shape[axis:])
    array = views.with_axis(value.array, axis) if value.is_quantized else value.array.reshape(shape)
    axes = value.source.axes if value.source is not None else ()
    source = value.source and value.source.permuted([*range(axis), None, *range(axis, len(axes))])
    return dataclasses.replace(value, array=array, source=source)


def _stacked(interpreter: Interpreter, operands: Sequence[Value], axis: int) -> Value | None:
    """Joins parameters along a new axis, such as a list of layers before a scan; returns None if they differ."""
    sources = [value.source for value in operands if value.source is not None]
    first = operands[0]
    of_path, specs = interpreter.resolved.of_path, interpreter.resolved.specs
    alike = len(sources) == len(operands) and all(
        value.shape == first.shape
        and value.dtype == first.dtype
        and source.axes[axis] == ()
        and (source.axes, source.derived) == (sources[0].axes, sources[0].derived)
        and all(of_path.get(path) == of_path.get(sources[0].path) for path in source.paths)
        and all(specs.get(path) == specs.get(sources[0].path) for path in source.paths)
        for value, source in zip(operands, sources, strict=False)
    )
    if not alike or first.shape[axis] != 1 or any(value.is_concatenated for value in operands):
        return None
    array = _joined([value.array for value in operands], axis)
    return None if array is None else dataclasses.replace(first, array=array, source=sources[0].stacked(sources))


def _joined(arrays: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays with one entry along an axis; returns None if the kinds of arrays differ."""
    if any(isinstance(array, Adapted) for array in arrays):
        return Adapted.joined(arrays, axis) if all(isinstance(array, Adapted) for array in arrays) else None
    if not any(map(is_quantized, arrays)):
        return lax.concatenate(list(arrays), axis)
    return views.joined(arrays, axis) if all(map(is_quantized, arrays)) else None


def _barrier(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    # One barrier for all operands, because a barrier also orders its operands.
    arrays = lax.optimization_barrier([value.array for value in operands])
    return [dataclasses.replace(value, array=array) for value, array in zip(operands, arrays, strict=True)]


def _reverse(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    dimensions = equation.params["dimensions"]
    # The source stays: the parts of an axis are the same in reverse order.
    return _result(interpreter, equation, operands, operands[0].source, lambda view: views.reverse(view, dimensions))


def _pad(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Keeps a parameter that is padded with zeros, which codes can represent, as that parameter."""
    widths, (value, padding) = equation.params["padding_config"], operands
    is_cut = any(min(low, high) < 0 or within for low, high, within in widths)
    # Other numbers than 0 may lack a code.
    if value.source is None or padding.known != 0 or is_cut:
        return interpreter.as_it_is(equation, operands)
    source = value.source.resized(equation.outvars[0].aval.shape)
    pairs = [(int(low), int(high)) for low, high, _ in widths]
    return _result(interpreter, equation, operands, source, lambda view: views.pad(view, pairs))


def _all_gather(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Keeps a parameter that devices gather from its shards, as experts inside of a `jax.shard_map`; gathers codes."""
    source, axis = operands[0].source, equation.params["all_gather_dimension"]
    if source is None or not equation.params["tiled"]:
        return interpreter.as_it_is(equation, operands)
    # The entries of a shard already represent the complete axis.
    source = source.resized(equation.outvars[0].aval.shape)

    def gather(part: Any) -> Any:
        return versions.bind(equation, [part])[0]

    return _result(interpreter, equation, operands, source, lambda view: views.gathered(view, axis, gather))


def _concatenated(parts: Sequence[Value], axis: int) -> Value:
    sources, dtype = tuple(part.source for part in parts), parts[0].dtype
    array = Concatenated(tuple(part.array for part in parts), axis, sources, jnp.dtype(dtype).name)
    paths = tuple(dict.fromkeys(path for part in parts for path in part.paths))
    return Value(array, None, False, dtype, made_of=paths, made_by="concatenate")


def _cast(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    value, dtype = operands[0], jnp.dtype(equation.params["new_dtype"])
    if value.is_concatenated:
        parts = [interpreter.evaluate(equation, [part])[0] for part in value.parts]
        return [_concatenated(parts, value.array.axis)]
    if value.is_quantized and jnp.issubdtype(dtype, jnp.floating):
        # Codes keep their type; the cast shows only when they are dequantized.
        return [dataclasses.replace(value, dtype=dtype)]
    (result,) = interpreter.as_it_is(equation, operands)
    return [dataclasses.replace(result, source=value.source)]


def _keep(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    """Applies an equation that leaves entries unchanged, such as a sharding constraint, to the codes."""

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
        "rev": _reverse,
        "stack": _stack,
        "pad": _pad,
        "optimization_barrier": _barrier,
        "all_gather": _all_gather,
        "dynamic_slice": _dynamic_slice,
        "broadcast_in_dim": _broadcast,
        "convert_element_type": _cast,
        **dict.fromkeys(_KEPT, _keep),
    }
)
