"""`gated_linear_unit` on CPUs, with a backward pass of its own."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops.building import ACTIVATIONS, accurate_dtype, vary_alike
from stack_kernels.cpu import on_cpu_unquantized
from stack_kernels.linear.product import XLA, Products, transposed

__all__ = ["CPU", "GatedProducts", "gated_linear_unit"]


@dataclass(frozen=True)
class GatedProducts:
    """How the op is computed.

    Attributes:
      gated: (activation, rows, w_gate, w_up, keeps_products) -> y and, if they are kept, the product with w_gate and
        that with w_up, in the dtype of `rows`.
      products: of the backward pass.
      gradients: (activation, product with w_gate, product with w_up, cotangent of y) -> the cotangents of the two
        products, in their dtype.
    """

    gated: Callable[[str, Any, Any, Any, bool], Sequence[Any]]
    products: Products
    gradients: Callable[[str, Any, Any, Any], tuple[Any, Any]]


def gated_linear_unit(how: GatedProducts, x: Any, w_gate: Any, w_up: Any, *, activation: str) -> Any:
    """y = f(x G) * (x U), with gradients."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    result = _gated_linear_unit(how, activation, *vary_alike(rows, w_gate, w_up))
    return result.reshape(*x.shape[:-1], w_up.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_linear_unit(how: GatedProducts, activation: str, rows: Any, w_gate: Any, w_up: Any) -> Any:
    return how.gated(activation, rows, w_gate, w_up, False)[0]


def _forward(how: GatedProducts, activation: str, rows: Any, w_gate: Any, w_up: Any) -> Any:
    """What the backward pass finds saved: x and the two products, in their dtype; f(x G) is computed again."""
    gated, gate, up = how.gated(activation, rows, w_gate, w_up, True)
    return gated, (rows, w_gate, w_up, gate, up)


def _backward(how: GatedProducts, activation: str, residuals: Any, cotangent: Any) -> Any:
    # Behind a barrier, or XLA shares f(x G) with the forward pass where both are in one computation: it would be kept
    # in fp32 until now.
    (rows, w_gate, w_up, gate, up), cotangent = lax.optimization_barrier((residuals, cotangent))
    accurate, products = accurate_dtype(rows.dtype), how.products
    of_gate, of_up = how.gradients(activation, gate, up, cotangent)
    of_rows = products.row_gradient(of_gate, w_gate, accurate) + products.row_gradient(of_up, w_up, accurate)
    columns = transposed(rows)
    of_weights = (products.weight_gradient(columns, of_product, rows.dtype) for of_product in (of_gate, of_up))
    return of_rows.astype(rows.dtype), *of_weights


_gated_linear_unit.defvjp(_forward, _backward)


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    gate, up = XLA.times(rows, w_gate, rows.dtype), XLA.times(rows, w_up, rows.dtype)
    accurate = accurate_dtype(rows.dtype)
    gated = ACTIVATIONS[activation](gate.astype(accurate)) * up.astype(accurate)
    return gated.astype(rows.dtype), gate, up


def _gradients(activation: str, gate: Any, up: Any, cotangent: Any) -> tuple[Any, Any]:
    accurate = accurate_dtype(gate.dtype)
    cotangent = cotangent.astype(accurate)
    activated, activation_vjp = jax.vjp(ACTIVATIONS[activation], gate.astype(accurate))
    of_gate = activation_vjp(cotangent * up.astype(accurate))[0]
    return of_gate.astype(gate.dtype), (cotangent * activated).astype(up.dtype)


CPU = OpImplementation(
    op="gated_linear_unit",
    name="cpu",
    function=functools.partial(gated_linear_unit, GatedProducts(_gated, XLA, _gradients)),
    supports=on_cpu_unquantized,
    vjp=AUTODIFF,
)
