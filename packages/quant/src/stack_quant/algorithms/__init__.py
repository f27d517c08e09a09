"""Quantization algorithms: a registry of methods that choose the codes of a weight, beyond rounding to the nearest.

An algorithm sees one slice of a parameter at a time, such as one layer of a scan, as the matrices of its product. Codes
keep the type and the tiles of the rule. Some algorithms transform the inputs of the product (`TransformedArray`), and
others choose codes; "+" combines them, as in "hadamard+gptq".
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from stack_core.abi import errors
from stack_core.abi.plugins import registries
from stack_quant.qarray import QArray
from stack_quant.spec import ArraySpec
from stack_quant.transform.layout import Layout
from stack_quant.transformed import InputSpec

__all__ = ["Algorithm", "Step", "Weight", "parse_algorithms"]


@dataclass(frozen=True)
class Weight:
    """A weight to be quantized.

    Attributes:
      path: path of the parameter in messages.
      array: slice of the parameter, floating.
      spec: specification of the slice.
      layout: arrangement of the slice as the matrices w[batch, d_in, d_out] of its product.
      moments: float32[batch, d_in, d_in], the mean of x x^T over the factors x of the product; None for an algorithm
        without a stream.
      largest: float32[batch, d_in], the largest magnitude of each factor; None without a stream.
      cross_moments: float32[batch, d_in, d_in], the mean of z (x - z)^T over the factors z of the product and its
        factors x in the float model; None unless an algorithm has `correct` and the product is the only use of the
        parameter and has the same rows in both models.
      inputs: form of the transform of the inputs, or None.
    """

    path: str
    array: jax.Array
    spec: ArraySpec
    layout: Layout
    moments: Any = None
    largest: Any = None
    cross_moments: Any = None
    inputs: InputSpec | None = None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with `quantize`, `correct`, `input_scale`, `rotates`, `folds` or several of these.

    Attributes:
      name: name in the registry, such as "gptq".
      needs_stream: True if it uses `Weight.moments` or `Weight.largest`.
      quantize: function of a weight and the options that returns its quantized array.
      correct: function of a weight and the options that returns another array to quantize, unless the weight has no
        `cross_moments`. It needs a second pass over the stream, in the float model.
      input_scale: function of a weight and the options that returns s[batch, d_in]. Inputs are divided by s, and rows
        of the weight are multiplied by s.
      rotates: True if inputs are rotated by blocks; the option "block" is the largest block.
      folds: True if all parameters are rotated before they are quantized, by the options "stream" and "heads"; see
        `fold_rotations`.
      options: default of each option, by name; an option with an integer as its default takes whole numbers.
    """

    name: str
    needs_stream: bool
    quantize: Callable[[Weight, Mapping[str, int | float]], QArray] | None = None
    correct: Callable[[Weight, Mapping[str, int | float]], jax.Array] | None = None
    input_scale: Callable[[Weight, Mapping[str, int | float]], jax.Array] | None = None
    rotates: bool = False
    folds: bool = False
    options: Mapping[str, int | float] = field(default_factory=dict)


Step = tuple[Algorithm, Mapping[str, int | float]]
"""An algorithm with its options."""


def parse_algorithms(text: str) -> tuple[Step, ...]:
    """Parses "name", "name,option=number,..." or several such terms with "+" between.

    Raises:
      UnknownName: no plugin registers the algorithm; the message suggests the nearest name and lists all names.
      ArgumentError: an algorithm does not have the option, its value is not a number of at least 0, or the algorithms
        cannot be combined in this order.
    """
    steps = tuple(_step(part) for part in text.split("+"))
    stages = [_stage(step) for step, _ in steps]
    if stages != sorted(set(stages)):
        raise errors.ArgumentError(
            f"algorithm={text!r}: combine at most one rotation of the model (quarot), one correction (qep), one "
            "algorithm for the scales of inputs (awq, smoothquant), one rotation of inputs (hadamard) and one "
            "algorithm for codes (gptq, autoround, hqq), in this order."
        )
    return steps


def _stage(step: Algorithm) -> int:
    # Corrections and input scales are found in the bases of the rotated model, and codes are chosen last.
    stages = step.folds, step.correct, step.input_scale, step.rotates
    return next((number for number, acts in enumerate(stages) if acts), len(stages))


def _step(text: str) -> Step:
    name, *rest = (part.strip() for part in text.split(","))
    found: Algorithm = registries.algorithms[name]
    options = dict(found.options)
    for part in rest:
        option, _, value = (piece.strip() for piece in part.partition("="))
        known = ", ".join(f"{name}={default:g}" for name, default in found.options.items()) or "none"
        if option not in options:
            # `nearest` is a module of this package, which would replace a function of that name.
            close = errors.nearest(option, found.options)
            raise errors.ArgumentError(f"algorithm={text!r}: {name} has no option {option!r}.{close} Options: {known}.")
        kind = type(found.options[option])
        try:
            options[option] = kind(value)
        except ValueError:
            options[option] = math.nan
        if not 0 <= options[option] < math.inf:
            wanted = "a whole number" if kind is int else "a number"
            raise errors.ArgumentError(
                f"algorithm={text!r}: {option} must be {wanted} of at least 0, given {value!r}. Options: {known}."
            )
    return found, options
