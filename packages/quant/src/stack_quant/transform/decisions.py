"""What a rule asks of one operation, and the report of what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.ops.building import is_quantized
from stack_quant.methods import ProductTypes
from stack_quant.qtypes import qtype
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec, range_ends_at_run_time
from stack_quant.tiling import tile_sizes
from stack_quant.transform import versions
from stack_quant.transform.coverage import OpRow
from stack_quant.transform.interpreter import Interpreter, Use, Value
from stack_quant.transform.sites import SiteKey, static_activation
from stack_quant.transform.straight_through import within_range

__all__ = ["Decision", "decide", "note", "product_types", "quantized_activation", "record"]

_AS_FLOATS = "activations are rounded to the type, and multiplied as floats"


@dataclass(frozen=True)
class Decision:
    """What the rules say of one operation.

    Attributes:
      number: the place of the rule that decides, or None.
      rule: that rule.
      reason: why operands are not quantized; "" where they are.
      path: of the parameter that the rule is for, or None.
    """

    number: int | None
    rule: Rule | None
    reason: str = ""
    path: str | None = None

    @property
    def activations(self) -> str | None:
        """The type that operands are quantized to that are no parameters."""
        return None if self.rule is None or self.reason else self.rule.activations


def decide(interpreter: Interpreter, name: str, operands: Sequence[Value]) -> Decision:
    """Which rule decides on an operation, by its operands that may be quantized."""
    treatment = interpreter.treatment
    parameters = [value for value in operands if value.source is not None]
    if not parameters:
        number = treatment.of_activations(name)
        mixed = {path: value.made_by for value in operands if not value.from_data for path in value.made_of}
        interpreter.uses.extend(Use(path, name, (), mixed=made_by) for path, made_by in mixed.items())
        if number is None and mixed:
            makers = " and ".join(dict.fromkeys(mixed.values()))
            return Decision(None, None, f"an operand is what {makers} makes of {' and '.join(mixed)}")
        if number is None:
            return Decision(None, None, "no rule is for this product of activations")
        return Decision(number, treatment.rules[number])
    ruled = sorted(parameters, key=lambda value: not value.is_quantized)
    source = ruled[0].source
    assert source is not None, "only those that have one are listed"
    number = treatment.of_path.get(source.path)
    if number is None:
        return Decision(None, None, f"no rule matches {source.path}")
    rule, reason = treatment.rules[number], ""
    if source.derived:
        reason = f"the operand is what {source.derived} makes of {source.path}"
    elif not rule.matches_op(name):
        reason = f"rule {number} is for other operations"
    elif rule.weights is None and rule.activations is None:
        reason = f"rule {number} leaves it in float"
    return Decision(number, rule, reason, source.path)


def note(
    interpreter: Interpreter,
    name: str,
    value: Value,
    contracted: Sequence[int],
    free: Sequence[int] = (),
    *,
    is_lookup: bool = False,
) -> None:
    """Notes the use of a parameter.

    Args:
      contracted: the axes of the value that are summed over, the slowest first.
      free: those that the result keeps; a product has an entry of its own for each of the others.
    """
    source = value.source
    if source is not None:
        parts, kept = source.parts(contracted), source.parts(free)
        interpreter.uses.extend(
            Use(path, name, parts, kept, is_lookup=is_lookup, derived=bool(source.derived)) for path in source.paths
        )


def quantized_activation(
    interpreter: Interpreter,
    decision: Decision,
    array: Any,
    contracted: int | Sequence[int],
    *,
    site: str,
    tiled: bool = True,
) -> tuple[Any, Any]:
    """Quantizes an activation as rule and method say, with scales of its own along all axes but the contracted ones.

    Under a rule of static ranges the scales are the same along all axes. Also returns the floats whose derivative the
    result has, for `straight_through`.

    Args:
      site: the name of the operation and of the operand.
      tiled: along the contracted axis, if it is one, as the rule's tiles are.
    """
    rule = decision.rule
    assert rule is not None and rule.activations is not None, "asked only where a rule says so"
    axes = (contracted,) if isinstance(contracted, int) else tuple(contracted)
    tile = qtype(rule.activations).block_size or _tile(interpreter, decision, math.prod(array.shape[at] for at in axes))
    tiles = {axes[0]: tile} if tile is not None and tiled and len(axes) == 1 else {}
    channels = () if rule.is_static else tuple(axis for axis in range(array.ndim) if axis not in axes)
    spec = ArraySpec(
        type=rule.activations,
        channel_axes=channels,
        tiles=tiles,
        calibration=rule.activation_calibration,
        range_ends=range_ends_at_run_time(rule.range_ends, rule.activations),
    )
    method = interpreter.treatment.method
    if rule.is_static and method.keeps_ranges:
        result = static_activation(interpreter, SiteKey(decision.path, site, interpreter.place), array, spec)
    else:
        result = method.activation(array, spec, None)
    return result, within_range(array, result, rule) if is_quantized(result) else array


def _tile(interpreter: Interpreter, decision: Decision, entries: int) -> int | None:
    """How many of so many contracted entries share a scale: as many as the parameter's, or else as the rule allows."""
    rule = decision.rule
    assert rule is not None, "asked only where a rule decides"
    wanted, _ = rule.tiles
    if not rule.smaller_tiles or wanted is None:
        return wanted
    tile = interpreter.treatment.tiles.get(decision.path or "", wanted)
    return tile if entries % tile == 0 else tile_sizes(entries, wanted)[0]


def product_types(interpreter: Interpreter, decision: Decision, right: Value) -> ProductTypes:
    """The types of a product that is trained, where a weight is on the right if one is among its operands."""
    rule = decision.rule
    assert rule is not None, "asked only where a rule decides"
    if interpreter.is_weight(right):
        calibrations = rule.activation_calibration, rule.weight_calibration
        return ProductTypes(rule.activations, rule.weights, rule.gradients, calibrations, rule.range_ends)
    kind = rule.activations if right.source is None else None
    return ProductTypes(rule.activations, kind, rule.gradients, (rule.activation_calibration,) * 2, rule.range_ends)


def record(
    interpreter: Interpreter,
    equation: Any,
    name: str,
    operands: Sequence[Value],
    decision: Decision,
    arrays: Sequence[Any],
    computed: str = "",
) -> None:
    """Reports an operation; `arrays` are the operands as they go into it, each with its value in the same place.

    Args:
      computed: "rounded" where operands are codes that this operation takes as the floats that they stand for.
    """
    reason = decision.reason or (_AS_FLOATS if computed == "rounded" else "")
    kinds = tuple(_kind(interpreter, decision, *pair) for pair in zip(operands, arrays, strict=True))
    if not computed:
        codes = sum(map(is_quantized, arrays))
        in_training = "rounded" if interpreter.treatment.method.products is None else "quantized"
        as_floats = "float" if kinds == tuple(str(array.dtype) for array in arrays) else in_training
        computed = (as_floats, "dequantized", "quantized")[min(codes, 2)]
    paths = tuple(path for value in operands if value.source is not None for path in value.source.paths)
    where = versions.source_of(equation)
    interpreter.rows.append(OpRow(name, paths, decision.number, kinds, computed, reason, where))


def _kind(interpreter: Interpreter, decision: Decision, value: Value, array: Any) -> str:
    """The scheme of an operand, or the type that floats are rounded to."""
    if is_quantized(array):
        scheme = array.__stack_qview__().scheme
        has_static = decision.rule is not None and decision.rule.is_static and value.source is None
        return f"{scheme} static" if has_static else scheme
    if decision.rule is None or decision.reason:
        return str(array.dtype)
    of_weight = decision.rule.weights if interpreter.is_weight(value) else None
    of_activation = decision.activations if value.source is None else None
    return of_weight or of_activation or str(array.dtype)
