"""Gated linear unit."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.ops import OpCall
from stack_core.ops.definitions.linear import affine, linear
from stack_core.ops.definitions.low_rank import LowRankArray, is_low_rank
from stack_core.ops.dispatch.backward_call import BackwardCall, as_backward
from stack_core.ops.dispatch.check import Axes, check_floating, check_known, check_positive, check_same_dtype
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.differentiated import differentiated
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.remat import named_residuals
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.quantized import QuantizedArray, dequantize, is_quantized, logical_array

__all__ = ["ACTIVATIONS", "OP", "REFERENCE", "gate_product", "gated_linear_unit"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}


def gated_linear_unit(
    x: Float[Array, "*batch d_in"],
    w_gate: Float[Array, "d_in d_out"] | QuantizedArray | LowRankArray,
    w_up: Float[Array, "d_in d_out"] | QuantizedArray | LowRankArray,
    *,
    bias_gate: Float[Array, " d_out"] | None = None,
    bias_up: Float[Array, " d_out"] | None = None,
    activation: str = "silu",
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*batch d_out"]:
    """Computes the product of a linear map passed through an activation and a second linear map.

        y = f(min(g, l)) * (clip(u, -l, l) + c)        g = x G + a        u = x U + b

    l is `limit` (None: no clamping) and c is `up_offset`. g and u are rounded to the dtype of `x`; everything else is
    computed in fp32. The gradient of clamped values is 0. The experts of gpt-oss use `activation="quick_gelu"`,
    `limit=7.0`, `up_offset=1.0`.

    Args:
      x: [..., d_in].
      w_gate: G, [d_in, d_out], of the dtype of `x`; or quantized (any class with `__stack_qview__`).
      w_up: U, [d_in, d_out], likewise; either may be quantized without the other. If either has adapters (any class
        with `__stack_low_rank__`), both products are calls of `linear` and `implementation` applies to these.
      bias_gate: a, [d_out], of any floating dtype, added in fp32.
      bias_up: b, likewise.
      activation: f: "silu" (SwiGLU), "gelu" (exact), "gelu_tanh", "quick_gelu" (g / (1 + exp(-1.702 g))), "relu",
        "relu_squared" or "sigmoid".
      limit: l, positive; clamps g from above and u on both sides.
      up_offset: c, constant added to the clamped u.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      [..., d_out], of the dtype of `x`.

    Raises:
      ShapeError: d_in or d_out differ between the arguments.
      ArgumentError: the operands are not floating, or of different dtypes, or the limit is not positive.
      UnknownName: unknown activation.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202); limit and offset as in gpt-oss, 2025
    (arXiv:2508.10925), `GptOssExperts` of transformers.
    """
    options = {"activation": activation, "limit": limit, "up_offset": up_offset}
    check_known("gated_linear_unit", "activation", activation, tuple(ACTIVATIONS))
    check_positive("gated_linear_unit", limit=limit)
    if is_low_rank(w_gate) or is_low_rank(w_up):
        gate = linear(x, w_gate, bias=bias_gate, implementation=implementation, axes=_of_linear("gate", axes))
        up = linear(x, w_up, bias=bias_up, implementation=implementation, axes=_of_linear("up", axes))
        return gate_product(*named_residuals("gated_linear_unit", gate, up), **options)
    sizes = Axes("gated_linear_unit")
    sizes.match("x", x, "... d_in")
    sizes.match("w_gate", logical_array(w_gate), "d_in d_out")
    sizes.match("w_up", logical_array(w_up), "d_in d_out")
    sizes.match("bias_gate", bias_gate, "d_out")
    sizes.match("bias_up", bias_up, "d_out")
    weights = {"w_gate": w_gate, "w_up": w_up}
    check_floating("gated_linear_unit", x=x, bias_gate=bias_gate, bias_up=bias_up)
    check_same_dtype("gated_linear_unit", x=x, **{name: w for name, w in weights.items() if not is_quantized(w)})
    arrays = {"x": x, **weights, "bias_gate": bias_gate, "bias_up": bias_up}
    return dispatch(OP, arrays, options, implementation, axes)


def _of_linear(part: str, axes: LogicalNames | None) -> LogicalNames | None:
    """Renames the logical axes of one of the two products to the parameters of `linear`."""
    if axes is None:
        return None
    names = {"x": "x", f"w_{part}": "weight", f"bias_{part}": "bias"}
    return {names[name]: given for name, given in axes.items() if name in names}


def _reference(
    x: Any, w_gate: Any, w_up: Any, *, bias_gate: Any, bias_up: Any, requested: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    gate, up = _affine(x, w_gate, bias_gate), _affine(x, w_up, bias_up)
    return gate_product(gate, up, **options), {"gate": gate, "up": up}


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    # Not -1, which is ambiguous for arrays without features.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    result = affine(rows, dequantize(weight, x.dtype), bias, x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])


_affine_backward = differentiated(lambda x, weight, bias, requested: (_affine(x, weight, bias), {}))[1]


@as_backward
def _backward(call: BackwardCall) -> dict[str, Any]:
    """Computes the gradients, and recomputes the two products if they are not among the residuals."""
    arrays, parts = call.arrays, ("gate", "up")
    products = [call.residuals.get(part) for part in parts]
    # Another forward pass may have run, which saves no residuals.
    if products[0] is None:
        products = [_affine(arrays["x"], arrays[f"w_{part}"], arrays[f"bias_{part}"]) for part in parts]
    _, gated_vjp = jax.vjp(functools.partial(gate_product, **call.options), *products)
    gradients: dict[str, Any] = {}
    for part, of_product in zip(parts, gated_vjp(call.cotangents), strict=True):
        names = {"x": "x", "weight": f"w_{part}", "bias": f"bias_{part}"}
        operands = {own: arrays[name] for own, name in names.items()}
        of_one = frozenset(own for own, name in names.items() if name in call.requested)
        for own, found in _affine_backward(operands, {}, None, {}, of_product, requested=of_one).items():
            gradients[names[own]] = gradients["x"] + found if own == "x" and "x" in gradients else found
    return gradients


def gate_product(gate: Any, up: Any, *, activation: str, limit: float | None, up_offset: float) -> Any:
    """Computes y from g and u in fp32 and returns it in their dtype."""
    dtype, accurate = gate.dtype, accurate_dtype(gate.dtype)
    gate, up = gate.astype(accurate), up.astype(accurate)
    if limit is not None:
        # `jnp.clip` would halve the gradient of a value equal to the limit.
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    if up_offset:
        up = up + up_offset
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)


def _axes(call: OpCall) -> OpAxes:
    operands = {
        "x": "... d_in",
        **dict.fromkeys(("w_gate", "w_up"), "d_in d_out"),
        **dict.fromkeys(("bias_gate", "bias_up"), "d_out"),
    }
    # Partial sums over a split d_in could not pass through the activation.
    products = {"gate": "... d_out", "up": "... d_out"}
    return OpAxes(operands, ("... d_out",), products, whole=frozenset({"d_in"}))


OP = Op("gated_linear_unit", _reference, _axes, folds="...", residuals=("gate", "up"), backward=_backward)
"""The residuals `gate` and `up` are g and u, in the dtype of `x`."""

REFERENCE = OP.implementation()
