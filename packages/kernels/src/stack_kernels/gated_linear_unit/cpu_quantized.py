"""`gated_linear_unit` on CPUs with quantized weights."""

from typing import Any

import jax

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops.building import ACTIVATIONS, accurate_dtype, is_quantized
from stack_kernels.linear.cpu_quantized import CONFIGS, QuantizedConfig, quantized_product, supports_quantized
from stack_kernels.linear.product import product

__all__ = ["CPU_QUANTIZED"]


def _call(x: Any, w_gate: Any, w_up: Any, *, activation: str, config: QuantizedConfig) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    gate, up = (
        quantized_product(rows, weight, x.dtype, config) if is_quantized(weight) else product(rows, weight, x.dtype)
        for weight in (w_gate, w_up)
    )
    accurate = accurate_dtype(x.dtype)
    gated = ACTIVATIONS[activation](gate.astype(accurate)) * up.astype(accurate)
    return gated.astype(x.dtype).reshape(*x.shape[:-1], up.shape[-1])


CPU_QUANTIZED = OpImplementation(
    op="gated_linear_unit",
    name="cpu_quantized",
    function=_call,
    supports=supports_quantized,
    vjp=AUTODIFF,
    configs=CONFIGS,
)
