"""Handlers of core's ops, each of which is one equation. Ops take quantized weights and choose an implementation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.ops.building import gate_product, is_quantized, named_residuals
from stack_core.ops.units import OpUnit, unit_of
from stack_quant.transform import views
from stack_quant.transform.adapters import gated_as_linear_maps
from stack_quant.transform.decisions import Decision, decide, note, product_types, quantized_activation, record
from stack_quant.transform.inputs import have_equal_transforms, with_transformed_inputs
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value
from stack_quant.transform.products import NOT_TRAINED, linear_call, mapped, ragged_call
from stack_quant.transform.straight_through import rounded, straight_through

__all__ = ["ACTIVATIONS", "WEIGHTS", "unit_axis"]

_Product = Callable[[Any, Any], Any]

WEIGHTS: Mapping[str, Mapping[str, int]] = {
    "gated_linear_unit": {"w_gate": 0, "w_up": 0},
    "linear": {"weight": 0},
    "linear_cross_entropy": {"weight": 0},
    "ragged_dot": {"rhs": 1},
}
"""Weight arguments that may be quantized, by op, and the contracted axis of each."""

ACTIVATIONS: Mapping[str, Mapping[str, int]] = {
    "attention": {"query": 3, "key": 3, "value": 1},
    "gated_linear_unit": {"x": -1},
    "linear": {"x": -1},
    "linear_cross_entropy": {"hidden": -1},
    "ragged_dot": {"lhs": 1},
}
"""The other factors of the products, by op, and the contracted axis of each."""

_OF_LINEAR = ("linear", "gated_linear_unit")
"""Ops that run as `ops.linear` if both operands are quantized."""


_TRAINED = (*_OF_LINEAR, "ragged_dot")
"""Ops for which methods of quantized training have products."""


def _unit(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> list[Value]:
    unit = unit_of(equation)
    assert unit is not None, "the handler of units alone"
    name = interpreter.name(equation, unit.op)
    places = unit.arrays(range(len(operands)))
    named = (*WEIGHTS.get(unit.op, {}), *ACTIVATIONS.get(unit.op, {}))
    if not all(isinstance(places[argument], int) for argument in named):  # an argument is already quantized
        return interpreter.as_it_is(equation, operands)
    arguments = {places[argument]: argument for argument in named}
    weights = {places[argument]: axis for argument, axis in WEIGHTS.get(unit.op, {}).items()}
    factors = {places[argument]: axis for argument, axis in ACTIVATIONS.get(unit.op, {}).items()}
    for place, axis in weights.items():
        kept = unit_axis(unit, place, operands[place], axis + 1)
        note(interpreter, name, operands[place], [unit_axis(unit, place, operands[place], axis)], [kept])
    if not factors:
        return _in_float(interpreter, equation, name, operands, None)
    if not have_equal_transforms([operands[place] for place in weights]):
        # Only the gated unit has two matrices.
        return gated_as_linear_maps(interpreter, unit, operands)
    operands = with_transformed_inputs(interpreter, operands, *_shared_axes(unit, operands, factors, weights))
    decision = decide(interpreter, name, [operands[place] for place in (weights or factors)])
    is_trained = interpreter.resolved.method.products is not None
    if is_trained and unit.op not in _TRAINED and not decision.reason:
        decision = dataclasses.replace(decision, reason=NOT_TRAINED)
    if decision.reason or not (
        decision.activations or any(interpreter.is_weight(operands[place]) for place in weights)
    ):
        return _in_float(interpreter, equation, name, operands, decision)
    arrays: list[Any] = [
        value.array if place in weights else interpreter.plain(value) for place, value in enumerate(operands)
    ]
    floats = list(arrays)
    if decision.activations:
        # A weight argument may itself be computed from data, and then follows the rule for activations.
        activations = {place: axis for place, axis in weights.items() if operands[place].source is None}
        for place, axis in {**factors, **activations}.items():
            at, argument = unit_axis(unit, place, operands[place], axis), arguments[place]
            arrays[place], floats[place] = quantized_activation(
                interpreter, decision, arrays[place], at, site=f"{name}/{argument}"
            )
    of = [operands[place] for place in (*factors, *weights)]
    computed = _computed(interpreter, unit, decision, operands, arrays)
    record(interpreter, equation, name, of, decision, [arrays[place] for place in (*factors, *weights)], computed)
    if is_trained:
        results = [_trained(interpreter, unit, arrays, operands, decision)]
    else:
        results = _called(unit, arrays, floats, [value.dtype for value in operands])
    return [interpreter.new(result, *operands) for result in results]


def _shared_axes(
    unit: OpUnit, operands: Sequence[Value], factors: Mapping[int, int], weights: Mapping[int, int]
) -> tuple[int, dict[int, dict[int, int]]]:
    """Returns the index of the inputs, and their contracted axis for the contracted axis of each matrix."""
    (factor, axis), *_ = factors.items()
    at = unit_axis(unit, factor, operands[factor], axis)
    return factor, {place: {unit_axis(unit, place, operands[place], own): at} for place, own in weights.items()}


def _computed(
    interpreter: Interpreter, unit: OpUnit, decision: Decision, operands: Sequence[Value], arrays: Sequence[Any]
) -> str:
    """Returns `OpRow.computed`, or "" if it follows from the arrays."""
    if interpreter.resolved.method.products is not None and unit.op == "ragged_dot":
        types = product_types(interpreter, decision, unit.arrays(operands)["rhs"])
        return "" if types.multiplies_codes else "rounded"
    if not any(map(is_quantized, arrays)):
        return ""
    if decision.activations is None:
        return "dequantized"
    return "quantized" if unit.op in _OF_LINEAR else "rounded"


def _in_float(
    interpreter: Interpreter, equation: Any, name: str, operands: Sequence[Value], decision: Decision | None
) -> list[Value]:
    touched = [value for value in operands if value.source is not None]
    if decision is not None:
        interpreter.left(equation, touched or operands[:2], name, decision.reason, decision.number)
    elif any(value.is_quantized for value in operands):
        interpreter.left(equation, touched, name, f"{name} takes no quantized operand")
    return interpreter.as_it_is(equation, operands)


def unit_axis(unit: OpUnit, place: int, value: Value, axis: int) -> int:
    """Returns the axis of a mapped operand that corresponds to an axis of the op's argument."""
    axes = list(range(len(value.shape)))
    for taken in _mapped(unit, place):
        del axes[taken]
    return axes[axis]


def _mapped(unit: OpUnit, place: int) -> list[int]:
    """Returns the mapped axes of an operand, from the outermost `jax.vmap` inwards."""
    return [axis for axes in reversed(unit.batching) if (axis := axes[place]) is not None]


def _called(unit: OpUnit, arrays: Sequence[Any], floats: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Runs an op and returns its results as the flat list of its equation.

    Args:
      floats: the operands with the floats of the activations, whose derivative the result has.
    """
    places = unit.arrays(range(len(arrays)))
    is_gated = unit.op == "gated_linear_unit" and is_quantized(arrays[places["x"]])
    if unit.op != "linear" and not is_gated:  # remaining ops get the rounded activations as floats
        arrays = floats = [rounded(*each) for each in zip(arrays, floats, dtypes, strict=True)]
    arrays, floats = (
        [_mappable(unit, place, array) for place, array in enumerate(each)] if unit.batching else each
        for each in (arrays, floats)
    )
    if is_gated:
        return [_gated(unit, arrays, floats, dtypes[places["x"]])]
    return jax.tree.leaves(straight_through(unit, arrays, floats))


def _mappable(unit: OpUnit, place: int, array: Any) -> Any:
    """Repeats the scales to one per entry along the mapped axes."""
    if not is_quantized(array):
        return array
    axes = list(range(len(array.shape)))
    taken = [axes.pop(axis) for axis in _mapped(unit, place)]
    return views.full_along(views.view_of(array), taken) if taken else array


def _gated(unit: OpUnit, arrays: Sequence[Any], floats: Sequence[Any], dtype: Any) -> Any:
    """Computes the gated linear unit by its two products of quantized operands."""

    def product(x: Any, weight: Any, *, dtype: Any) -> Any:
        call = functools.partial(ops.linear, preferred_dtype=dtype)
        return straight_through(call, *zip(x, weight, strict=True))

    products = [functools.partial(product, dtype=summed) for summed in _product_dtypes(unit, arrays, dtype)]
    factors = {place for name, place in unit.arrays(range(len(arrays))).items() if name in ("x", "w_gate", "w_up")}
    pairs = [
        (array, in_float) if place in factors else array
        for place, (array, in_float) in enumerate(zip(arrays, floats, strict=True))
    ]
    return _mapped_over(unit, functools.partial(_gate, unit, dtype, *products), pairs)


def _product_dtypes(unit: OpUnit, arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the dtypes of the two products of the gated unit: float32 if a bias is added."""
    given = unit.arrays(arrays)
    # The bias is added before the sum is rounded to the result's dtype, as in the op itself.
    return [dtype if given[bias] is None else jnp.float32 for bias in ("bias_gate", "bias_up")]


def _gate(unit: OpUnit, dtype: Any, gate_call: _Product, up_call: _Product, *arrays: Any) -> Any:
    given = unit.arrays(arrays)
    gate = _biased(gate_call(given["x"], given["w_gate"]), given["bias_gate"], dtype)
    up = _biased(up_call(given["x"], given["w_up"]), given["bias_up"], dtype)
    return gate_product(*named_residuals("gated_linear_unit", gate, up), **unit.options)


def _biased(product: Any, bias: Any, dtype: Any) -> Any:
    return (product if bias is None else product + bias.astype(product.dtype)).astype(dtype)


def _trained(
    interpreter: Interpreter, unit: OpUnit, arrays: Sequence[Any], operands: Sequence[Value], decision: Decision
) -> Any:
    """Computes the op by products of quantized training."""
    values, levels = unit.arrays(operands), len(unit.batching)
    if unit.op == "gated_linear_unit":
        dtype = values["x"].dtype
        calls = [
            linear_call(interpreter, decision, values[name], summed, levels=levels)
            for name, summed in zip(("w_gate", "w_up"), _product_dtypes(unit, arrays, dtype), strict=True)
        ]
        return _mapped_over(unit, functools.partial(_gate, unit, dtype, *calls), arrays)
    if unit.op == "ragged_dot":
        ragged = ragged_call(interpreter, decision, values["rhs"], levels=levels)
        return _mapped_over(unit, functools.partial(_ragged, unit, ragged), arrays)
    dtype, bias = unit.options["preferred_dtype"], values["bias"]
    summed = dtype if bias is None else jnp.float32
    product = linear_call(interpreter, decision, values["weight"], summed, levels=levels)

    def call(*arrays: Any) -> Any:
        given = unit.arrays(arrays)
        return _biased(product(given["x"], given["weight"]), given["bias"], dtype)

    return _mapped_over(unit, call, arrays)


def _ragged(unit: OpUnit, product: Callable[..., Any], *arrays: Any) -> Any:
    given = unit.arrays(arrays)
    rows, sizes, bias = given["lhs"], given["group_sizes"], given["bias"]
    result = product(rows, given["rhs"], sizes)
    if bias is None:
        return result
    # The side skips empty groups, which end where the previous group ends.
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
    added = jnp.take(bias.astype(jnp.float32), group, axis=0, mode="fill", fill_value=0)  # rows after all groups are 0
    return (result.astype(jnp.float32) + added).astype(rows.dtype)


def _mapped_over(unit: OpUnit, call: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    for level, axes in enumerate(unit.batching):
        call = mapped(call, axes, level)
    return call(*arrays)


HANDLERS["stack_op"] = _unit
