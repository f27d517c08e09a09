"""`gated_linear_unit` on CPUs, with its own backward pass."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import ACTIVATIONS, BackwardCall, accurate_dtype, as_backward
from stack_kernels.linear.product import XLA, Products, row_gradient, transposed, weight_gradient
from stack_kernels.supports import takes_no, unquantized

__all__ = ["XLA_CPU", "GatedProducts", "gated_gradients", "gated_linear_unit", "is_plain"]


def is_plain(call: OpCall) -> bool | str:
    """Returns True for y = f(x G) * (x U) whose backward pass gets the two products, else the reason why not."""
    if call.direction == "backward" and not {"gate", "up"} <= set(call.residuals):
        return f"it reads the two products, which {call.forward} does not keep"
    if call.options["up_offset"]:
        return "it adds no up_offset"
    return takes_no(call, "bias_gate", "bias_up", "limit")


@dataclass(frozen=True)
class GatedProducts:
    """Functions that compute the op.

    Attributes:
      gated: (activation, rows, w_gate, w_up, keeps_products) -> y and, if `keeps_products`, the products with w_gate
        and w_up, in the dtype of `rows`.
      products: products of the backward pass.
      gradients: (activation, product with w_gate, product with w_up, cotangent of y) -> cotangents of the two products,
        in their dtype.
    """

    gated: Callable[[str, Any, Any, Any, bool], Sequence[Any]]
    products: Products
    gradients: Callable[[str, Any, Any, Any], tuple[Any, Any]]


def gated_linear_unit(
    functions: GatedProducts,
    x: Any,
    w_gate: Any,
    w_up: Any,
    *,
    activation: str,
    requested: frozenset[str],
    **unused: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """Computes y = f(x G) * (x U), and the two products if requested, for a call that `is_plain`."""
    del unused
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    gated, *products = functions.gated(activation, rows, w_gate, w_up, bool(requested))
    shape = (*x.shape[:-1], w_up.shape[-1])
    # Not strict: machine code returns only y if the products are not requested.
    residuals = {name: product.reshape(shape) for name, product in zip(("gate", "up"), products, strict=False)}
    return gated.reshape(shape), residuals


def gated_gradients(functions: GatedProducts, call: BackwardCall) -> Mapping[str, Any]:
    """Computes the gradients from x and the two products, in their dtype; recomputes f(x G)."""
    # Without the barrier, if both passes are in one computation, XLA would share f(x G) with the forward pass and hold
    # it in fp32 until the backward pass.
    weights = {name: call.arrays[name] for name in ("x", "w_gate", "w_up")}
    inputs = weights, call.residuals["gate"], call.residuals["up"], call.cotangents
    operands, *of_rows = lax.optimization_barrier(inputs)
    x, products = operands["x"], functions.products
    leading = math.prod(x.shape[:-1])
    rows, gate, up, cotangent = (array.reshape(leading, array.shape[-1]) for array in (x, *of_rows))
    of_gate, of_up = functions.gradients(call.options["activation"], gate, up, cotangent)
    gradients: dict[str, Any] = {}
    if "x" in call.requested:
        accurate = accurate_dtype(x.dtype)
        of_x = row_gradient(products, rows, operands["w_gate"], of_gate, accurate)
        # Both terms are in fp32, and their sum is rounded once.
        of_x = of_x + row_gradient(products, rows, operands["w_up"], of_up, accurate)
        gradients["x"] = of_x.astype(x.dtype).reshape(x.shape)
    # Transposed once for both weight gradients.
    columns = transposed(rows)
    for name, of_product in (("w_gate", of_gate), ("w_up", of_up)):
        if name in call.requested:
            gradients[name] = weight_gradient(products, columns, operands[name], of_product, x.dtype)
    return gradients


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    # Both are returned in any case: XLA drops results that nothing reads.
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


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    plain = is_plain(call)
    return unquantized(call, chip) if plain is True else plain


_XLA = GatedProducts(_gated, XLA, _gradients)

XLA_CPU = OpImplementation(
    op="gated_linear_unit",
    name="xla_cpu",
    forward=functools.partial(gated_linear_unit, _XLA),
    backward=as_backward(functools.partial(gated_gradients, _XLA)),
    platforms=("cpu",),
    supports=_supports,
    residuals=("gate", "up"),
)
