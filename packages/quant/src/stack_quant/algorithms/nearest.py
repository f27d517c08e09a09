"""Rounding to the nearest, as without an algorithm: a name for rounding where a recipe has another default."""

from collections.abc import Mapping

from stack_quant.algorithms import Algorithm, Weight
from stack_quant.conversion import quantize_array
from stack_quant.qarray import QArray

__all__ = ["NEAREST"]


def _quantize(weight: Weight, options: Mapping[str, int | float]) -> QArray:
    return quantize_array(weight.array, weight.spec, name=weight.path)


NEAREST = Algorithm("nearest", needs_stream=False, quantize=_quantize)
