"""Bases of products, norms, attention and loops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stack_core.ops.units import OpUnit, unit_of
from stack_quant.rotations.bases import Axis, fix, join, merged
from stack_quant.rotations.symmetries import PRIMITIVES, UNITS, NormScale, Symmetries, Tracked, fixed, free_axes, opaque
from stack_quant.transform import versions

__all__: list[str] = []


def _unit(equation: Any) -> OpUnit:
    unit = unit_of(equation)
    assert unit is not None, "the handlers of units alone"
    return unit


def _dot_general(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    (first, second), name = operands, equation.primitive.name
    (summed, others), (batch, batches) = equation.params["dimension_numbers"]
    if len(summed) != 1:
        return opaque(found, equation, operands)
    for axis, other in zip(batch, batches, strict=True):
        fix(first.axes[axis], name)
        fix(second.axes[other], name)
    found.contract(first, summed[0], second, others[0], name)
    kept = [axis for place, axis in enumerate(first.axes) if place not in (*summed, *batch)]
    kept += [axis for place, axis in enumerate(second.axes) if place not in (*others, *batches)]
    return [Tracked((*fixed(equation.outvars[0].aval.shape[: len(batch)], name).axes, *kept))]


def _add_bias(found: Symmetries, bias: Tracked | None, outputs: Axis, name: str) -> None:
    if bias is not None:
        found.consume(bias, name)
        join(bias.axes[-1], outputs, name)


def _linear(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    unit = _unit(equation)
    given = unit.arrays(operands)
    x, weight = given["x"], given["weight"]
    found.contract(x, -1, weight, 0, unit.op)
    _add_bias(found, given["bias"], weight.axes[1], unit.op)
    return [Tracked((*x.axes[:-1], weight.axes[1]))]


def _gated_linear_unit(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    unit = _unit(equation)
    given = unit.arrays(operands)
    for part in ("gate", "up"):
        weight = given[f"w_{part}"]
        found.contract(given["x"], -1, weight, 0, unit.op)
        _add_bias(found, given[f"bias_{part}"], weight.axes[1], unit.op)
        fix(weight.axes[1], unit.op)
    return [Tracked((*given["x"].axes[:-1], given["w_gate"].axes[1]))]


def _ragged_dot(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    unit = _unit(equation)
    given = unit.arrays(operands)
    rows, weight = given["lhs"], given["rhs"]
    for axis in (rows.axes[0], weight.axes[0], *given["group_sizes"].axes):
        fix(axis, unit.op)
    found.contract(rows, 1, weight, 1, unit.op)
    _add_bias(found, given["bias"], weight.axes[2], unit.op)
    return [Tracked((rows.axes[0], weight.axes[2]))]


def _attention(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Keeps the features of the values. The features of queries and keys have one basis."""
    unit = _unit(equation)
    given = unit.arrays(operands)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    for operand in operands:
        found.consume(operand, unit.op)
        is_factor = any(operand is factor for factor in (query, key, value))
        for axis in operand.axes[:-1] if is_factor else operand.axes:
            fix(axis, unit.op)
    merged((query.axes[-1], key.axes[-1]), unit.op)
    first, *rest = (fixed(variable.aval.shape, unit.op) for variable in equation.outvars)
    return [replace(first, axes=(*first.axes[:-1], value.axes[-1])), *rest]


def _norm(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    """Keeps the basis of an RMS norm. Its result contains the scale until a product takes it over."""
    unit = _unit(equation)
    given, options = unit.arrays(operands), unit.options
    terms = [given[name] for name in ("x", "residual") if given[name] is not None]
    for term in terms:
        found.consume(term, unit.op)
    axes = tuple(merged(each, unit.op) for each in zip(*(term.axes for term in terms), strict=True))
    normed, result = axes[options["axis"]], Tracked(axes)
    scale, offset = given["scale"], given["offset"]
    if options["kind"] != "rms" or offset is not None:
        fix(normed, "a layer norm" if options["kind"] != "rms" else "a norm with an offset")
        for vector in (scale, offset):
            if vector is not None:
                found.consume(vector, unit.op)
                fix(vector.axes[0], unit.op)
    elif scale is not None:
        fix(scale.axes[0], "the scale of a norm")
        result = replace(result, scale=_scale_of(found, scale, normed, options["scale_offset"]), loops=scale.loops)
    return [result, *[Tracked(axes)] * (len(terms) - 1)]


def _scale_of(found: Symmetries, scale: Tracked, normed: Axis, offset: float) -> NormScale | None:
    own = found.parameter_axis(scale, 0)
    if own is None or own[1] != len(found.shapes[own[0]]) - 1 or len(scale.loops) != own[1]:
        found.consume(scale, "norm")
        fix(normed, "a norm with a computed scale")
        return None
    path, _ = own
    taken = found.scales.setdefault(path, NormScale(path, offset))
    taken.axes.append(normed)
    if taken.offset != offset:
        taken.block("norms add different offsets to it")
    return taken


def _scan(found: Symmetries, equation: Any, operands: Sequence[Tracked]) -> list[Tracked]:
    name, (consts, carried) = equation.primitive.name, versions.scan_counts(equation)
    start, rows, loop = operands[consts : consts + carried], operands[consts + carried :], object()
    # The carry has the bases of its first and of its last values.
    carry = [Tracked(free_axes(variable.aval.shape)) for variable in equation.outvars[:carried]]
    for value, first in zip(carry, start, strict=True):
        _pass_on(found, value, first, name)
    slices = []
    for row in rows:
        fix(row.axes[0], name)
        source = None if row.source is None else row.source.without(0)
        slices.append(replace(row, axes=row.axes[1:], source=source, loops=(*row.loops, loop)))
    results = found.run(equation.params["jaxpr"], [*operands[:consts], *carry, *slices])
    for value, last in zip(carry, results[:carried], strict=True):
        _pass_on(found, value, last, name)
    stacked = []
    for value, variable in zip(results[carried:], equation.outvars[carried:], strict=True):
        found.consume(value, name)
        stacked.append(Tracked((*fixed(variable.aval.shape[:1], name).axes, *value.axes)))
    return [*carry, *stacked]


def _pass_on(found: Symmetries, carry: Tracked, value: Tracked, name: str) -> None:
    found.consume(value, name)
    if value.number != 0:  # zeros are the same in any basis
        for pair in zip(carry.axes, value.axes, strict=True):
            merged(pair, name)


PRIMITIVES.update({"dot_general": _dot_general, "scan": _scan})
UNITS.update(
    {
        "attention": _attention,
        "gated_linear_unit": _gated_linear_unit,
        "linear": _linear,
        "norm": _norm,
        "ragged_dot": _ragged_dot,
    }
)
