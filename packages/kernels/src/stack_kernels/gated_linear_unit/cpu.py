"""`gated_linear_unit` on CPUs, with a backward pass of its own."""

import functools
import math
from typing import Any

import jax
from jax import lax

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops.building import ACTIVATIONS, accurate_dtype, vary_alike
from stack_kernels.cpu import on_cpu_unquantized
from stack_kernels.linear.product import row_gradient, times, transposed, weight_gradient

__all__ = ["CPU"]


def _call(x: Any, w_gate: Any, w_up: Any, *, activation: str) -> Any:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    gated = _gated_linear_unit(activation, *vary_alike(rows, w_gate, w_up))
    return gated.reshape(*x.shape[:-1], w_up.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_linear_unit(activation: str, rows: Any, w_gate: Any, w_up: Any) -> Any:
    """y = f(x G) * (x U) of rows x[n, d_in]."""
    return _forward(activation, rows, w_gate, w_up)[0]


def _forward(activation: str, rows: Any, w_gate: Any, w_up: Any) -> Any:
    """What the backward pass finds saved: x and the two products, in their dtype; f(x G) is computed again."""
    gate, up = times(rows, w_gate, rows.dtype), times(rows, w_up, rows.dtype)
    accurate = accurate_dtype(rows.dtype)
    gated = ACTIVATIONS[activation](gate.astype(accurate)) * up.astype(accurate)
    return gated.astype(rows.dtype), (rows, w_gate, w_up, gate, up)


def _backward(activation: str, residuals: Any, cotangent: Any) -> Any:
    # Behind a barrier, or XLA shares f(x G) with the forward pass where both are in one computation: it would be kept
    # in fp32 until now.
    (rows, w_gate, w_up, gate, up), cotangent = lax.optimization_barrier((residuals, cotangent))
    accurate = accurate_dtype(rows.dtype)
    cotangent = cotangent.astype(accurate)
    activated, activation_vjp = jax.vjp(ACTIVATIONS[activation], gate.astype(accurate))
    of_gate = activation_vjp(cotangent * up.astype(accurate))[0].astype(rows.dtype)
    of_up = (cotangent * activated).astype(rows.dtype)
    of_rows = row_gradient(of_gate, w_gate, accurate) + row_gradient(of_up, w_up, accurate)
    columns = transposed(rows)
    return of_rows.astype(rows.dtype), weight_gradient(columns, of_gate), weight_gradient(columns, of_up)


_gated_linear_unit.defvjp(_forward, _backward)

CPU = OpImplementation(op="gated_linear_unit", name="cpu", function=_call, supports=on_cpu_unquantized, vjp=AUTODIFF)
