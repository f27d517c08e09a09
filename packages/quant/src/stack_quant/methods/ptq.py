"""Post-training quantization: weights are rounded to the nearest once, activations at run time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from stack_quant.conversion import quantize_array
from stack_quant.errors import RuleError
from stack_quant.methods import Method
from stack_quant.qarray import QArray
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec

__all__ = ["PTQ", "as_it_comes", "no_gradients"]


def no_gradients(name: str) -> Callable[[Sequence[Rule]], None]:
    """Returns a `Method.check` for a method that does not quantize gradients."""

    def check(rules: Sequence[Rule]) -> None:
        for number, rule in enumerate(rules):
            if rule.gradients is not None:
                raise RuleError(
                    f"Rule {number}, {rule}: method {name!r} has no gradients to quantize. "
                    "Leave `gradients` out, or train by method 'qt'."
                )

    return check


def _parameter(array: jax.Array, spec: ArraySpec, path: str) -> QArray:
    return quantize_array(array, spec, name=path)


def _entered(array: Any, spec: ArraySpec) -> Any:
    return array


def _activation(array: jax.Array, spec: ArraySpec, span: Range | None) -> QArray:
    return as_it_comes(spec)(array, range=span)


# One jitted function per spec, so activations of equal shapes share its programs.
@functools.cache
def as_it_comes(spec: ArraySpec) -> Callable[..., QArray]:
    """Returns a jitted `quantize_array` by a spec. It takes an array, `range` and `key`, and does not check for NaN."""
    return jax.jit(functools.partial(quantize_array, spec=spec, name="an activation"))


PTQ = Method("ptq", no_gradients("ptq"), _parameter, _entered, _activation, keeps_ranges=True)
