"""Lookups by index, such as of an embedding, which dequantize only the selected codes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from stack_core import ops
from stack_quant.transform import views
from stack_quant.transform.decisions import decide, note, record
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value
from stack_quant.transformed import TransformedArray

__all__: list[str] = []


def _gather(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    table, indices = operands
    if table.source is None:
        return interpreter.as_it_is(equation, operands)
    name = interpreter.name(equation, "gather")
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    single = {axis for axis in numbers.start_index_map if sizes[axis] == 1}
    # A lookup sums over nothing; scales are shared along the axes whose entries are selected together.
    rest = [axis for axis in range(len(table.shape)) if axis not in single]
    note(interpreter, name, table, rest, is_lookup=True)
    decision = decide(interpreter, name, [table])
    if not table.is_quantized or decision.reason or not _gathers_complete_slices(table, equation.params):
        if table.is_quantized and not decision.reason:
            decision = dataclasses.replace(decision, reason="slices are cut along several axes")
        interpreter.left(equation, [table], name, decision.reason, decision.number)
        return interpreter.as_it_is(equation, operands)
    record(interpreter, equation, name, [table], decision, [table.array], "quantized")
    if isinstance(table.array, TransformedArray):
        return [interpreter.new(_gathered_transformed(table.array, indices.array, equation, table.dtype), indices)]
    return [interpreter.new(_gathered(views.view_of(table.array), indices.array, equation, table.dtype), indices)]


def _gathers_complete_slices(table: Value, params: Any) -> bool:
    """Returns True if each index selects one entry along some indexed axes and all entries along the remaining axes."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    indexed = set(numbers.start_index_map)
    return not numbers.operand_batching_dims and all(
        size == table.shape[axis] or (axis in indexed and size == 1) for axis, size in enumerate(sizes)
    )


def _gathered_transformed(table: TransformedArray, indices: Any, equation: Any, dtype: Any) -> Any:
    """Looks up codes and transforms only the result, if slices are complete along the axes of the transform."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    kept = [axis for axis in range(table.ndim) if axis not in numbers.collapsed_slice_dims]
    # Axes of the result, by axis of the table.
    places = {axis: place for axis, place in zip(kept, numbers.offset_dims, strict=True) if sizes[axis] > 1}
    result = _gathered(views.view_of(table.base), indices, equation, jnp.float32)
    restored = table.restored(result, places)
    if restored is None:
        return _gathered(views.view_of(table), indices, equation, dtype)
    return restored.astype(dtype)


def _gathered(view: views.View, indices: Any, equation: Any, dtype: Any) -> Any:
    """Computes `lax.gather` of the dequantized array."""
    params = equation.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    indexed = numbers.start_index_map
    if jnp.iinfo(indices.dtype).bits < 32:  # the sizes of the axes, which follow, may exceed a small dtype
        indices = indices.astype(jnp.int32)
    # `vmap(lambda i: table[i])` also indexes the axes of which it takes all entries; the only index there is 0.
    single = {axis for axis in indexed if params["slice_sizes"][axis] == 1}
    last = np.asarray([view.shape[axis] - params["slice_sizes"][axis] for axis in indexed], indices.dtype)

    def part(array: Any) -> Any:
        tiles = np.asarray([view.shape[axis] // array.shape[axis] for axis in indexed], indices.dtype)
        places = jnp.clip(indices, 0, last) // tiles
        slices = [1 if axis in single else size for axis, size in enumerate(array.shape)]
        return lax.gather(array, places, numbers, slices, mode=GatherScatterMode.CLIP)

    taken = dataclasses.replace(
        view,
        codes=part(view.codes),
        scale=part(view.scale),
        zero_point=None if view.zero_point is None else part(view.zero_point),
    )
    result = ops.dequantize(taken, dtype)
    if mode in (GatherScatterMode.FILL_OR_DROP, None):
        fill = params["fill_value"]
        exists = jnp.all((indices >= 0) & (indices <= last), axis=-1)
        exists = lax.expand_dims(exists, numbers.offset_dims)
        result = jnp.where(exists, result, jnp.asarray(jnp.nan if fill is None else fill, dtype))
    return result


HANDLERS["gather"] = _gather
