"""Quantization-aware training: training with the rounding of the later post-training quantization.

Parameters stay in float. In each product the weight w and the activation x are rounded, forward and backward:

    y = Q(x) Q(w),  dL/dw = 1[low <= w <= high] * Q(x)^T dL/dy,  dL/dx = 1[low <= x <= high] * dL/dy Q(w)^T

The gradient of the rounding is the gradient of the clipping (straight-through estimator); the range is a constant. Q
is the same as in method "ptq" under the same rules: products agree up to the rounding of floating sums.

Source: Jacob et al., Quantization and Training of Neural Networks, 2018 (arXiv:1712.05877), section 3. Departures:
1. The range is calibrated at each call instead of averaged over calls. A rule with static ranges calibrates a single
   range for the entire array.
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
