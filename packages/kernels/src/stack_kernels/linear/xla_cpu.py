"""`linear` on CPUs, by products in forms that are fast there."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import BackwardCall, accurate_dtype, as_backward
from stack_kernels.linear.product import XLA, Products, row_gradient, transposed, weight_gradient
from stack_kernels.supports import unquantized

__all__ = ["XLA_CPU", "linear", "linear_gradients"]


def linear(
    products: Products, x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: frozenset[str]
) -> tuple[Any, Mapping[str, Any]]:
    """Computes the op by the given products."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if bias is None:
        result = products.times(rows, weight, preferred_dtype)
    else:
        result = products.times(rows, weight, accurate_dtype(x.dtype))
        result = (result + bias.astype(result.dtype)).astype(preferred_dtype)
    return result.reshape(*x.shape[:-1], weight.shape[-1]), {}


def linear_gradients(products: Products, call: BackwardCall) -> Mapping[str, Any]:
    """Computes the gradients of the op by the given products.

    First rounds the cotangent to the dtype of the operands.
    """
    x, weight, requested = call.arrays["x"], call.arrays["weight"], call.requested
    rows, cotangent = (array.reshape(math.prod(x.shape[:-1]), array.shape[-1]) for array in (x, call.cotangents))
    # Before the cotangent is rounded, because this sum runs over all rows.
    gradients = {"bias": jnp.sum(cotangent.astype(accurate_dtype(x.dtype)), axis=0)} if "bias" in requested else {}
    cotangent = cotangent.astype(x.dtype)
    if "x" in requested:
        gradients["x"] = row_gradient(products, rows, weight, cotangent, x.dtype).reshape(x.shape)
    if "weight" in requested:
        gradients["weight"] = weight_gradient(products, transposed(rows), weight, cotangent, x.dtype)
    return gradients


XLA_CPU = OpImplementation(
    op="linear",
    name="xla_cpu",
    forward=functools.partial(linear, XLA),
    backward=as_backward(functools.partial(linear_gradients, XLA)),
    platforms=("cpu",),
    supports=unquantized,
)
