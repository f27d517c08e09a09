"""`gated_linear_unit` on CPUs with quantized weights."""

from collections.abc import Mapping
from typing import Any

import jax

from stack_core.abi.ops import OWN, OpImplementation
from stack_core.ops.building import accurate_dtype, differentiated, gate_product, is_quantized
from stack_kernels.linear.product import product as plain_product
from stack_kernels.linear.xla_cpu_quantized import CONFIGS, QuantizedConfig, quantized_product, supports_quantized

__all__ = ["XLA_CPU_QUANTIZED"]


def _call(
    x: Any,
    w_gate: Any,
    w_up: Any,
    *,
    bias_gate: Any,
    bias_up: Any,
    config: QuantizedConfig,
    requested: Any,
    **options: Any,
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    rows = x.reshape(-1, x.shape[-1])

    def affine(weight: Any, bias: Any) -> jax.Array:
        # A bias is added before the only rounding.
        dtype = x.dtype if bias is None else accurate_dtype(x.dtype)
        is_coded = is_quantized(weight)
        result = quantized_product(rows, weight, dtype, config) if is_coded else plain_product(rows, weight, dtype)
        return (result if bias is None else result + bias.astype(dtype)).astype(x.dtype)

    flat = affine(w_gate, bias_gate), affine(w_up, bias_up)
    gate, up = (product.reshape(*x.shape[:-1], product.shape[-1]) for product in flat)
    return gate_product(gate, up, **options), {"gate": gate, "up": up}


_forward, _backward = differentiated(_call)

XLA_CPU_QUANTIZED = OpImplementation(
    op="gated_linear_unit",
    name="xla_cpu_quantized",
    forward=_forward,
    backward=_backward,
    platforms=("cpu",),
    supports=supports_quantized,
    default=lambda call, chip: CONFIGS[0],
    space=lambda call, chip: CONFIGS,
    residuals=("gate", "up", OWN),
)
