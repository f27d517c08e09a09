"""What a rule asks of one operation, and the report of what came of it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stack_core.ops.building import is_quantized
from stack_quant.conversion import quantize
from stack_quant.qtypes import qtype
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec
from stack_quant.transform import versions
from stack_quant.transform.coverage import OpRow
from stack_quant.transform.interpreter import Interpreter, Use, Value

__all__ = ["Decision", "decide", "note", "quantized_activation", "record"]


@dataclass(frozen=True)
class Decision:
    """What the rules say of one operation.

    Attributes:
      number: the place of the rule that decides, or None.
      rule: that rule.
      reason: why operands are not quantized; "" where they are.
    """

    number: int | None
    rule: Rule | None
    reason: str = ""

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
        reason = f"the operand is computed from {source.path}"
    elif not rule.matches_op(name):
        reason = f"rule {number} is for other operations"
    elif rule.weights is None and rule.activations is None:
        reason = f"rule {number} leaves it in float"
    return Decision(number, rule, reason)


def note(
    interpreter: Interpreter, name: str, value: Value, contracted: Sequence[int], *, is_lookup: bool = False
) -> None:
    """Notes the use of a parameter; `contracted` are the axes of the value that are summed over, the slowest first."""
    source = value.source
    if source is not None:
        parts = source.parts(contracted)
        interpreter.uses.append(Use(source.path, name, parts, is_lookup=is_lookup, derived=source.derived))


def quantized_activation(decision: Decision, array: Any, contracted: int | Sequence[int], *, tiled: bool = True) -> Any:
    """An activation quantized as the rule says, with scales of its own along all axes but the contracted ones.

    Args:
      tiled: along the contracted axis, if it is one, as the rule's tiles are.
    """
    rule = decision.rule
    assert rule is not None and rule.activations is not None, "asked only where a rule says so"
    axes = (contracted,) if isinstance(contracted, int) else tuple(contracted)
    tile = qtype(rule.activations).block_size or rule.tile_size
    tiles = {axes[0]: tile} if tile is not None and tiled and len(axes) == 1 else {}
    channels = tuple(axis for axis in range(array.ndim) if axis not in axes)
    spec = ArraySpec(type=rule.activations, channel_axes=channels, tiles=tiles, calibration=rule.activation_calibration)
    return _quantizer(spec)(array)


@functools.cache
def _quantizer(spec: ArraySpec) -> Callable[[Any], Any]:
    return jax.jit(functools.partial(quantize, spec=spec, name="an activation"))


def record(
    interpreter: Interpreter,
    equation: Any,
    name: str,
    operands: Sequence[Value],
    decision: Decision,
    arrays: Sequence[Any],
    computed: str = "",
) -> None:
    """Reports an operation; `arrays` are the operands as they go into it."""
    kinds = tuple(_kind(array) for array in arrays)
    if not computed:
        quantized = sum(map(is_quantized, arrays))
        computed = ("float", "dequantized", "quantized")[min(quantized, 2)]
    paths = tuple(value.source.path for value in operands if value.source is not None)
    where = versions.source_of(equation)
    interpreter.rows.append(OpRow(name, paths, decision.number, kinds, computed, decision.reason, where))


def _kind(array: Any) -> str:
    if is_quantized(array):
        return array.__stack_qview__().scheme
    return str(array.dtype)
