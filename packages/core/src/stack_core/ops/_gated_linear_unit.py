"""Gated linear unit: the product of two linear maps, one of them through an activation."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops._check import Axes, check_floating, check_known, check_same_dtype
from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import Implementation, dispatch
from stack_core.ops._quantized import QuantizedArray, dequantize, is_quantized, logical_array

__all__ = ["ACTIVATIONS", "REFERENCE", "gated_linear_unit"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}


def gated_linear_unit(
    x: Float[Array, "*batch d_in"],
    w_gate: Float[Array, "d_in d_out"] | QuantizedArray,
    w_up: Float[Array, "d_in d_out"] | QuantizedArray,
    *,
    activation: str = "silu",
    implementation: Implementation = None,
) -> Float[Array, "*batch d_out"]:
    """y = f(x G) * (x U).

    The activation and the product are computed in fp32 from the two products, which are rounded to the dtype of `x`.

    Args:
      x: [..., d_in].
      w_gate: G, [d_in, d_out], of the dtype of `x`; or quantized, any class with `__stack_qview__`.
      w_up: U, [d_in, d_out], likewise; either may be quantized without the other.
      activation: f: "silu" (SwiGLU), "gelu" (exact), "gelu_tanh", "relu", "relu_squared" or "sigmoid".
      implementation: a name, several in order of preference, or None to let core choose.

    Returns:
      [..., d_out], of the dtype of `x`.

    Raises:
      ShapeError: d_in or d_out differ between the arguments.
      ArgumentError: the operands are not floating, or of different dtypes.
      UnknownName: the activation is none of those above.
      UnsupportedOp: no implementation, or not the one named, supports the call.

    Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
    """
    axes = Axes("gated_linear_unit")
    axes.match("x", x, "... d_in")
    axes.match("w_gate", logical_array(w_gate), "d_in d_out")
    axes.match("w_up", logical_array(w_up), "d_in d_out")
    weights = {"w_gate": w_gate, "w_up": w_up}
    check_floating("gated_linear_unit", x=x)
    check_same_dtype("gated_linear_unit", x=x, **{name: w for name, w in weights.items() if not is_quantized(w)})
    check_known("gated_linear_unit", "activation", activation, tuple(ACTIVATIONS))
    return dispatch("gated_linear_unit", {"x": x, **weights}, {"activation": activation}, implementation)


def _reference(x: Any, w_gate: Any, w_up: Any, *, activation: str) -> Any:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    gate = contract("ni,io->no", rows, dequantize(w_gate, x.dtype), x.dtype)
    up = contract("ni,io->no", rows, dequantize(w_up, x.dtype), x.dtype)
    accurate = accurate_dtype(x.dtype)
    gated = ACTIVATIONS[activation](gate.astype(accurate)) * up.astype(accurate)
    return gated.astype(x.dtype).reshape(*x.shape[:-1], up.shape[-1])


REFERENCE = OpImplementation(op="gated_linear_unit", name="reference", function=_reference, vjp=AUTODIFF, priority=0)
