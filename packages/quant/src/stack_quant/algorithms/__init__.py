"""Quantization algorithms: a registry of methods that choose the codes of a weight, beyond rounding to the nearest.

An algorithm sees one slice of a parameter at a time, such as one layer of a scan, as the matrices of its product. Codes
keep the type and the tiles of the rule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from stack_core.abi.errors import ArgumentError, nearest
from stack_core.abi.plugins import registries
from stack_quant.qarray import QArray
from stack_quant.spec import ArraySpec
from stack_quant.transform.layout import Layout

__all__ = ["Algorithm", "Weight", "algorithm"]


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
    """

    path: str
    array: jax.Array
    spec: ArraySpec
    layout: Layout
    moments: Any = None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm.

    Attributes:
      name: name in the registry, such as "gptq".
      needs_stream: True if it uses `Weight.moments`.
      quantize: function of a weight and the options that returns its quantized array.
      options: default of each option, by name; an option with an integer as its default takes whole numbers.
    """

    name: str
    needs_stream: bool
    quantize: Callable[[Weight, Mapping[str, int | float]], QArray]
    options: Mapping[str, int | float] = field(default_factory=dict)


def algorithm(text: str) -> tuple[Algorithm, dict[str, int | float]]:
    """Parses "name" or "name,option=number,..." and returns the algorithm with its options.

    Raises:
      UnknownName: no plugin registers the algorithm; the message suggests the nearest name and lists all names.
      ArgumentError: the algorithm does not have the option, or its value is not a number of at least 0.
    """
    name, *rest = (part.strip() for part in text.split(","))
    found: Algorithm = registries.algorithms[name]
    options = dict(found.options)
    for part in rest:
        option, _, value = (piece.strip() for piece in part.partition("="))
        known = ", ".join(f"{name}={default:g}" for name, default in found.options.items()) or "none"
        if option not in options:
            close = nearest(option, found.options)
            raise ArgumentError(f"algorithm={text!r}: {name} has no option {option!r}.{close} Options: {known}.")
        kind = type(found.options[option])
        try:
            options[option] = kind(value)
        except ValueError:
            options[option] = math.nan
        if not 0 <= options[option] < math.inf:
            wanted = "a whole number" if kind is int else "a number"
            raise ArgumentError(
                f"algorithm={text!r}: {option} must be {wanted} of at least 0, given {value!r}. Options: {known}."
            )
    return found, options
