"""Post-training quantization: weights are rounded to the nearest at once, activations as they come."""

from collections.abc import Sequence

import jax

from stack_quant.conversion import quantize
from stack_quant.errors import RuleError
from stack_quant.methods import Method
from stack_quant.qarray import QArray
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec

__all__ = ["PTQ"]


def _check(rules: Sequence[Rule]) -> None:
    for number, rule in enumerate(rules):
        if rule.gradients is not None:
            raise RuleError(f"Rule {number}, {rule}: method 'ptq' has no gradients to quantize. Leave `gradients` out.")


def _parameter(array: jax.Array, spec: ArraySpec, path: str) -> QArray:
    return quantize(array, spec, name=path)


PTQ = Method("ptq", _check, _parameter)
