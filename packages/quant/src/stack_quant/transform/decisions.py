"""Decisions of the rules on operations, and their rows in the report."""

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
    """The decision of the rules on one operation.

    Attributes:
      number: index of the rule that applies, or None.
      rule: this rule, or None.
      reason: reason why operands are not quantized; "" if they are.
      path: path of the parameter to which the rule applies, or None.
    """

    number: int | None
    rule: Rule | None
    reason: str = ""
    path: str | None = None

    @property
    def activations(self) -> str | None:
        """The type to which operands that are not parameters are quantized, or None."""
        return None if self.rule is None or self.reason else self.rule.activations


def decide(interpreter: Interpreter, name: str, operands: Sequence[Value]) -> Decision:
    """Finds the rule that applies to an operation.

    Args:
      operands: operands that may be quantized. With several parameters among them, a quantized one decides.
    """
    resolved = interpreter.resolved
    parameters = [value for value in operands if value.source is not None]
    if not parameters:
        number = resolved.of_activations(name)
        # Recorded although nothing is quantized: the plan's errors name the primitive that hides the parameter.
        mixed = {path: value.made_by for value in operands if not value.from_data for path in value.made_of}
        interpreter.uses.extend(Use(path, name, (), mixed=made_by) for path, made_by in mixed.items())
        if number is None and mixed:
            makers = " and ".join(dict.fromkeys(mixed.values()))
            return Decision(None, None, f"an operand is the result of {makers} on {' and '.join(mixed)}")
        if number is None:
            return Decision(None, None, "no rule matches this product of activations")
        return Decision(number, resolved.rules[number])
    ruled = sorted(parameters, key=lambda value: not value.is_quantized)
    source = ruled[0].source
    assert source is not None, "only those that have one are listed"
    number = resolved.of_path.get(source.path)
    if number is None:
        return Decision(None, None, f"no rule matches {source.path}")
    rule, reason = resolved.rules[number], ""
    if source.derived:
        reason = f"the operand is the result of {source.derived} on {source.path}"
    elif not rule.matches_op(name):
        reason = f"rule {number} applies to other operations"
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
    """Records the use of a parameter in an operation.

    Args:
      contracted: axes of the value over which the operation sums, the slowest first.
      free: axes that the result keeps. The remaining axes are batch axes.
      is_lookup: True if the operation selects entries by index.
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
    """Quantizes an activation by rule and method, with separate scales along all axes but the contracted ones.

    Under a rule with static ranges the scales are the same along these axes, too. Also returns the floats whose
    derivative the result has, for `straight_through`.

    Args:
      site: name of the operation and of the operand.
      tiled: True divides a single contracted axis into the tiles of the rule.
    """
    rule = decision.rule
    assert rule is not None and rule.activations is not None, "asked only where a rule says so"
    axes = (contracted,) if isinstance(contracted, int) else tuple(contracted)
    # Types with blocks prescribe the tile; the rule cannot choose another.
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
    method = interpreter.resolved.method
    if rule.is_static and method.keeps_ranges:
        result = static_activation(interpreter, SiteKey(decision.path, site, interpreter.place), array, spec)
    else:
        result = method.activation(array, spec, None)
    return result, within_range(array, result, rule) if is_quantized(result) else array


def _tile(interpreter: Interpreter, decision: Decision, entries: int) -> int | None:
    """Returns the tile size of an activation: the parameter's if it divides `entries`, else a size the rule allows."""
    rule = decision.rule
    assert rule is not None, "asked only where a rule decides"
    wanted, _ = rule.tiles
    if not rule.smaller_tiles or wanted is None:
        return wanted
    tile = interpreter.resolved.tiles.get(decision.path or "", wanted)
    return tile if entries % tile == 0 else tile_sizes(entries, wanted)[0]


def product_types(interpreter: Interpreter, decision: Decision, right: Value) -> ProductTypes:
    """Returns the types of a product in quantized training. A weight among its operands is the right one."""
    rule = decision.rule
    assert rule is not None, "asked only where a rule decides"
    if interpreter.is_weight(right):
        calibrations = rule.activation_calibration, rule.weight_calibration
        return ProductTypes(rule.activations, rule.weights, rule.gradients, calibrations, rule.range_ends)
    # A parameter that no rule quantizes stays in float.
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
    """Adds a row for an operation to the report.

    Args:
      arrays: operands in the form in which they enter the operation, in the order of `operands`.
      computed: see `OpRow`; "" derives it from `arrays`. "rounded" if the operation dequantizes its operands.
    """
    reason = decision.reason or (_AS_FLOATS if computed == "rounded" else "")
    kinds = tuple(_kind(interpreter, decision, *pair) for pair in zip(operands, arrays, strict=True))
    if not computed:
        codes = sum(map(is_quantized, arrays))
        in_training = "rounded" if interpreter.resolved.method.products is None else "quantized"
        as_floats = "float" if kinds == tuple(str(array.dtype) for array in arrays) else in_training
        # By the number of operands that are codes.
        computed = (as_floats, "dequantized", "quantized")[min(codes, 2)]
    paths = tuple(path for value in operands if value.source is not None for path in value.source.paths)
    where = versions.source_of(equation)
    interpreter.rows.append(OpRow(name, paths, decision.number, kinds, computed, reason, where))


def _kind(interpreter: Interpreter, decision: Decision, value: Value, array: Any) -> str:
    """Returns the scheme of a quantized operand, or the type to which floats are rounded."""
    if is_quantized(array):
        scheme = array.__stack_qview__().scheme
        has_static = decision.rule is not None and decision.rule.is_static and value.source is None
        return f"{scheme} static" if has_static else scheme
    if decision.rule is None or decision.reason:
        return str(array.dtype)
    of_weight = decision.rule.weights if interpreter.is_weight(value) else None
    of_activation = decision.activations if value.source is None else None
    return of_weight or of_activation or str(array.dtype)
