"""Handler of functions of a device's shards inside pipeline stages, such as a mixture of experts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stack_quant.errors import QuantError
from stack_quant.transform.interpreter import HANDLERS, Interpreter, Value

__all__: list[str] = []


def _parts(interpreter: Interpreter, equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
    """Runs the function in float.

    Its derivative is the derivative of the function in float. A rule that rounds inside would therefore train another
    function than without stages.

    Raises:
      QuantError: a rule quantizes the inputs of a product inside.
    """
    records: dict[str, Any] = {"rows": [], "uses": [], "stops": {}, "sites": {}, "draws": list(interpreter.draws)}
    probe = dataclasses.replace(interpreter, **records, measured=dict(interpreter.measured))
    probe.run(equation.params["jaxpr"], operands)
    resolved = interpreter.resolved
    for row in probe.rows:
        if row.rule is None or row.computed == "float":
            continue
        if resolved.method.products is not None or resolved.rules[row.rule].activations is not None:
            raise QuantError(
                f"Rule {row.rule}, {resolved.rules[row.rule]}: {' '.join([row.op, *row.paths])} is part of a function "
                "of each device's shards, such as a mixture of experts, which pipeline stages compute in float. Give "
                "it a rule without activations by a method other than 'qt', or set mesh.stage=1."
            )
    if any(operand.is_quantized for operand in operands):
        name = equation.primitive.name
        interpreter.left(equation, operands, interpreter.name(equation, name), f"{name} takes no quantized operand")
    return interpreter.as_it_is(equation, operands)


HANDLERS["stack_parts"] = _parts
