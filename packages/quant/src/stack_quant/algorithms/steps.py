"""Runs of the algorithms of one weight, one after another."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stack_quant.algorithms import Step, Weight
from stack_quant.conversion import quantize_array
from stack_quant.qarray import QArray
from stack_quant.transformed import TransformedArray, hadamard

__all__ = ["Quantized", "choose_codes"]

Quantized = QArray | TransformedArray


def choose_codes(weight: Weight, steps: Sequence[Step]) -> Quantized:
    """Quantizes a weight by its algorithms: a correction, scales of its inputs, a rotation, and codes of the result.

    Without an algorithm for codes, values are rounded to the nearest.
    """
    scale = None
    quantizers = [(step.quantize, options) for step, options in steps if step.quantize is not None]
    for step, options in steps:
        if step.correct is not None and weight.cross_moments is not None:
            weight = dataclasses.replace(weight, array=step.correct(weight, options))
        if step.input_scale is not None:
            factors = step.input_scale(weight, options)
            weight, scale = _scaled(weight, factors), _as_parameter(weight, 1 / factors)
        if step.rotates:
            weight = _rotated(weight)
    if quantizers:
        choose, options = quantizers[-1]
        base = choose(weight, options)
    else:
        base = quantize_array(weight.array, weight.spec, name=weight.path)
    inputs = weight.inputs
    return base if inputs is None else TransformedArray(base, scale, inputs.axis, inputs.block)


def _scaled(weight: Weight, factors: jax.Array) -> Weight:
    """Multiplies the rows of a weight by factors[batch, d_in] and divides the statistics of its inputs."""
    rows = weight.layout.restored(jnp.broadcast_to(factors[:, :, None], weight.layout.matrices))
    return dataclasses.replace(
        weight,
        array=(weight.array * rows).astype(weight.array.dtype),
        moments=weight.moments / (factors[:, :, None] * factors[:, None, :]),
        largest=weight.largest / factors,
    )


def _as_parameter(weight: Weight, factors: jax.Array) -> jax.Array:
    """Returns factors[batch, d_in] in the axes of the weight, with one entry along the axes that a product keeps."""
    assert weight.inputs is not None and weight.inputs.scale_shape is not None, "planned for such an algorithm"
    rows = weight.layout.restored(jnp.broadcast_to(factors[:, :, None], weight.layout.matrices))
    return rows[tuple(slice(size) for size in weight.inputs.scale_shape)].astype(jnp.float32)


def _rotated(weight: Weight) -> Weight:
    """Returns the weight and the moments of its inputs after a rotation."""
    assert weight.inputs is not None, "planned for such an algorithm"
    axis, block = weight.inputs.axis, weight.inputs.block
    moments = weight.moments
    if moments is not None:
        # Blocks divide the contracted axis that varies fastest.
        moments = hadamard(hadamard(moments, 1, block), 2, block)
    array = hadamard(weight.array.astype(jnp.float32), axis, block).astype(weight.array.dtype)
    return dataclasses.replace(weight, array=array, moments=moments, largest=None)
