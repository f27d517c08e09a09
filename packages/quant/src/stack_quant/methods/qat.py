"""Quantization-aware training: a model learns with the rounding that quantization after the training will do.

Parameters stay floating. In each product a weight w and an activation x are rounded, forward and backward:

    y = Q(x) Q(w),  dL/dw = 1[low <= w <= high] * Q(x)^T dL/dy,  dL/dx = 1[low <= x <= high] * dL/dy Q(w)^T

The rounding has the gradient of the clipping alone (straight through); the range that is clipped to has none. Q is that
of method "ptq" under the same rules, to whose products these are equal but for the rounding of floating sums.

Source: Jacob et al., Quantization and Training of Neural Networks, 2018 (arXiv:1712.05877), section 3; the range is
that of the calibration at each call, and no average over calls; under a rule of static ranges, of the whole array.
"""

from typing import Any

import jax

from stack_quant.conversion import fake_quantize
from stack_quant.methods import Method
from stack_quant.methods.ptq import no_gradients
from stack_quant.spec import ArraySpec

__all__ = ["QAT"]


def _parameter(array: Any, spec: ArraySpec, path: str) -> Any:
    return array


def _rounded(array: jax.Array, spec: ArraySpec, span: None = None) -> jax.Array:
    return fake_quantize(array, spec)


QAT = Method("qat", no_gradients("qat"), _parameter, _rounded, _rounded)
