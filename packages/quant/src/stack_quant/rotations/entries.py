"""Bases of operations on entries, and of operations that move entries."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from stack_quant.rotations.bases import Axis, fix, join, merged, parts_of
from stack_quant.rotations.symmetries import PRIMITIVES, Symmetries, Tracked, fixed, free_axes
from stack_quant.transform import views
from stack_quant.transform.interpreter import ENTRY_BY_ENTRY

__all__: list[str] = []

_KEPT = (
    "copy",
    "copy_p",
    "name",
    "neg",
    "optimization_barrier",
    "pcast",
    "pvary",
    "reduce_precision",
    "sharding_constraint",
    "stop_gradient",
)


def _unchanged(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    return list(operands)


def _cast(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    kinds = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    is_float = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
    return list(operands) if is_float or operands[0].number is not None else _nonlinear(found, equation, operands)


def _axes_in(equation: Any, operands: Sequence[Tracked]) -> list[list[Axis]]:
    """Returns the axes of the operands for each axis of the result. Scalars may be among the operands."""
    rank = len(equation.outvars[0].aval.shape)
    axes = [operand.axes or (None,) * rank for operand in operands]
    return [[each[place] for each in axes] for place in range(rank)]


def _nonlinear(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    name = equation.primitive.name
    for operand in operands:
        found.consume(operand, name)
        for axis in operand.axes:
            fix(axis, name)
    return [Tracked(tuple(next(filter(None, axes), None) for axes in _axes_in(equation, operands)))]


def _sum(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Adds or selects values of one basis. Zeros, and the NaN of masked entries, are the same in any basis."""
    name = equation.primitive.name
    is_choice = name == "select_n"
    terms = [term for term in (operands[1:] if is_choice else operands) if not _is_neutral(term)]
    rank = len(equation.outvars[0].aval.shape)
    if len(terms) == 1 and not is_choice and len(terms[0].axes) == rank:
        return terms
    for operand in operands:
        found.consume(operand, name)
    axes = [merged(each, name) for each in _axes_in(equation, terms or operands[-1:])]
    if is_choice:
        for place, (axis,) in enumerate(_axes_in(equation, operands[:1])):
            if axis is not None:  # entries are selected differently along this axis
                fix(axis, name)
                fix(axes[place], name)
                axes[place] = axes[place] or axis
    return [Tracked(tuple(axes))]


def _is_neutral(value: Tracked) -> bool:
    return value.number is not None and (value.number == 0 or math.isnan(value.number))


def _scaled(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Multiplies or divides by a factor that is equal along an axis, which keeps the axis' basis."""
    name, axes = equation.primitive.name, list[Axis]()
    for first, second in _axes_in(equation, operands):
        if second is not None and (first is not None or name == "div"):
            fix(first, name)
            fix(second, name)
        axes.append(first or second)
    holders = [operand for operand in operands if operand.scale is not None]
    kept = holders[0] if len(holders) == 1 and (name == "mul" or holders[0] is operands[0]) else None
    for operand in operands:
        found.consume(replace(operand, scale=None) if operand is kept else operand, name)
    return [Tracked(tuple(axes)) if kept is None else Tracked(tuple(axes), scale=kept.scale, loops=kept.loops)]


def _transpose(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    (value,), order = operands, equation.params["permutation"]
    source = None if value.source is None else value.source.permuted(order)
    return [replace(value, axes=tuple(value.axes[axis] for axis in order), source=source)]


def _reshape(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    value, name = operands[0], equation.primitive.name
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    source = None if value.source is None else value.source.reshaped(new)
    axes = list(free_axes(new))
    for olds, news in views.axis_groups(old, new):
        before = [value.axes[axis] for axis in olds if old[axis] > 1]
        after = tuple(basis for axis in news for basis in axes[axis] or ())
        if all(axis is None for axis in before):
            for axis in news:
                axes[axis] = None
        elif any(axis is None for axis in before):
            for axis in (*before, after):
                fix(axis, name)
        else:
            join(tuple(basis for axis in before for basis in axis or ()), after, name)
    return [replace(value, axes=tuple(axes), source=source)]


def _broadcast(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    value, shape = operands[0], equation.outvars[0].aval.shape
    places = {at: axis for axis, at in enumerate(equation.params["broadcast_dimensions"])}
    axes = tuple(value.axes[places[at]] if at in places else None for at in range(len(shape)))
    source = value.source
    if source is not None:
        repeats = any(at not in places and size > 1 for at, size in enumerate(shape))
        if repeats or source.others:
            found.consume(replace(value, scale=None), equation.primitive.name)
        source = None if repeats else source.permuted([places.get(at) for at in range(len(shape))])
    return [replace(value, axes=axes, source=source)]


def _cut(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Slices, pads or reverses some axes, which fixes their bases. The remaining axes keep theirs."""
    value, name = operands[0], equation.primitive.name
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    changed = {axis for axis, size in enumerate(before) if after[axis] != size}
    changed |= set(equation.params["dimensions"]) if name == "rev" else set()
    if name == "pad" and operands[1].number != 0:
        changed = set(range(len(before)))
    _consume_cut(found, value, changed, name)
    for axis in changed:
        fix(value.axes[axis], name)
    results = []
    for variable in equation.outvars:
        own = fixed(variable.aval.shape, name).axes
        axes = tuple(own[place] if place in changed else axis for place, axis in enumerate(value.axes))
        results.append(Tracked(axes, scale=value.scale, loops=value.loops))
    return results


def _consume_cut(found: Symmetries, value: Tracked, changed: Collection[int], name: str) -> None:
    """Records the use of a value by an operation that changes some axes, and other axes keep the scale of a norm."""
    scaled = [parts_of(axis) for axis in ([] if value.scale is None else value.scale.axes)]
    is_scaled = any(parts_of(value.axes[axis]) in scaled for axis in changed)
    found.consume(value if is_scaled else replace(value, scale=None), name)


def _concatenate(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    name, along = equation.primitive.name, equation.params["dimension"]
    for operand in operands:
        found.consume(operand, name)
        fix(operand.axes[along], name)
    own = fixed(equation.outvars[0].aval.shape, name).axes
    axes = [
        own[place] if place == along else merged(each, name) for place, each in enumerate(_axes_in(equation, operands))
    ]
    return [Tracked(tuple(axes))]


def _reduce_sum(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    value, name, summed = operands[0], equation.primitive.name, equation.params["axes"]
    found.consume(value, name)
    for axis in summed:
        fix(value.axes[axis], name)
    return [Tracked(tuple(axis for place, axis in enumerate(value.axes) if place not in summed))]


def _gather(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Looks up entries. Axes of which each lookup takes all entries keep their bases."""
    (table, indices), params = operands, equation.params
    name, numbers, sizes = equation.primitive.name, params["dimension_numbers"], params["slice_sizes"]
    for axis in indices.axes:
        fix(axis, name)
    shape, result = equation.invars[0].aval.shape, list(fixed(equation.outvars[0].aval.shape, name).axes)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape)) if axis not in dropped]
    # Entries out of range are NaN or zeros, which are the same in any basis.
    fill = params["fill_value"]
    is_neutral = fill is None or fill == 0 or math.isnan(fill)
    complete = {axis for axis in kept if sizes[axis] == shape[axis] and is_neutral}
    changed = set(range(len(shape))) - complete
    _consume_cut(found, table, changed, name)
    for axis in changed:
        fix(table.axes[axis], name)
    for axis, place in zip(kept, numbers.offset_dims, strict=True):
        if axis in complete:
            result[place] = table.axes[axis]
    if table.source is not None:
        found.tables.setdefault(table.source.path, []).extend(table.axes[axis] for axis in complete)
    return [Tracked(tuple(result), scale=table.scale, loops=table.loops)]


PRIMITIVES.update(
    {
        **dict.fromkeys(ENTRY_BY_ENTRY, _nonlinear),
        **dict.fromkeys(_KEPT, _unchanged),
        **dict.fromkeys(("add", "add_any", "sub", "select_n"), _sum),
        **dict.fromkeys(("mul", "div"), _scaled),
        **dict.fromkeys(("slice", "dynamic_slice", "split", "rev", "pad"), _cut),
        **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
        "broadcast_in_dim": _broadcast,
        "concatenate": _concatenate,
        "convert_element_type": _cast,
        "gather": _gather,
        "reduce_sum": _reduce_sum,
        "transpose": _transpose,
    }
)
