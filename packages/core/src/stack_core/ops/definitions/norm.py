"""Root-mean-square and layer normalization."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from stack_core.abi.errors import ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import check_floating, check_known, check_same_dtype, check_static
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["OP", "REFERENCE", "norm"]


def norm(
    x: Float[Array, "*shape"],
    scale: Float[Array, " size"] | None = None,
    *,
    offset: Float[Array, " size"] | None = None,
    kind: str = "rms",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Float[Array, "*shape"] | None = None,
    axis: int = -1,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*shape"] | tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Normalizes one axis to unit root mean square, or to zero mean and unit variance.

        rms:    y = (s + c) h / sqrt(mean(h^2) + epsilon) + b
        layer:  y = (s + c) (h - mean(h)) / sqrt(var(h) + epsilon) + b          with h = x + residual

    Statistics are computed, and scale and offset applied, in fp32; the result is rounded once.

    Args:
      x: array with at least one axis.
      scale: s, [x.shape[axis]], of any floating dtype; if None, s + c is 1.
      offset: b, [x.shape[axis]], of any floating dtype.
      kind: "rms" or "layer".
      epsilon: constant added to the mean square or the variance.
      scale_offset: c; 1.0 for Gemma, whose checkpoints store the effective scale minus 1.
      residual: array like `x`, added first; the sum is rounded before it is normalized.
      axis: the axis to normalize.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, used to shard implementations that XLA cannot partition:
        {"x": ("batch", "seq", None)}.

    Returns:
      y, like `x`; or the pair (y, h) if `residual` is given.

    Raises:
      ShapeError: the size of `scale` or `offset` differs from the axis, or the shape of `residual` from `x`.
      ArgumentError: an array is not floating, or `residual` has another dtype than `x`.
      UnknownName: unknown kind.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467); Ba, Kiros and Hinton,
    Layer Normalization, 2016 (arXiv:1607.06450).
    """
    check_floating("norm", x=x, scale=scale, offset=offset, residual=residual)
    check_known("norm", "kind", kind, ("rms", "layer"))
    check_static("norm", axis=axis)
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"norm: axis {axis} is outside x, whose shape is {x.shape}.")
    for name, array in (("scale", scale), ("offset", offset)):
        if array is not None and array.shape != (x.shape[axis],):
            raise ShapeError(
                f"norm: {name} has shape {array.shape}, but axis {axis} of x with shape {x.shape} has size "
                f"{x.shape[axis]}; expected {(x.shape[axis],)}."
            )
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"norm: residual has shape {residual.shape}, but x {x.shape}; make them equal.")
    check_same_dtype("norm", x=x, residual=residual)
    arrays = {"x": x, "scale": scale, "offset": offset, "residual": residual}
    # A negative axis keeps its meaning when `vmap` adds leading axes.
    options = {"kind": kind, "epsilon": epsilon, "scale_offset": scale_offset, "axis": axis % x.ndim - x.ndim}
    return dispatch(OP, arrays, options, implementation, axes)


def _reference(
    x: Any,
    scale: Any,
    *,
    offset: Any,
    residual: Any,
    kind: str,
    epsilon: float,
    scale_offset: float,
    axis: int,
    requested: Any,
) -> Any:
    if residual is not None:
        x = x + residual
    accurate = accurate_dtype(x.dtype)
    centred = x.astype(accurate)
    if kind == "layer":
        centred = centred - jnp.mean(centred, axis=axis, keepdims=True)
    factor = lax.rsqrt(jnp.mean(jnp.square(centred), axis=axis, keepdims=True) + epsilon)
    normed = centred * factor
    along_axis = tuple(size if index == axis + x.ndim else 1 for index, size in enumerate(x.shape))
    if scale is not None:
        normed = normed * (scale.astype(accurate) + scale_offset).reshape(along_axis)
    if offset is not None:
        normed = normed + offset.astype(accurate).reshape(along_axis)
    normed = normed.astype(x.dtype)
    return normed if residual is None else (normed, x), {"inverse_rms": factor}


def _axes(call: OpCall) -> OpAxes:
    # Other axes may be split, but statistics need all entries of the normalized axis.
    after = [f"after{number}" for number in range(-1 - call.options["axis"])]
    x, factor = (" ".join(["...", normed, *after]) for normed in ("size", "one"))
    outputs = (x,) if call.arrays["residual"] is None else (x, x)
    operands = {"x": x, "residual": x, "scale": "size", "offset": "size"}
    return OpAxes(operands, outputs, {"inverse_rms": factor}, whole=frozenset({"size", "one"}))


OP = Op("norm", _reference, _axes, folds="...", residuals=("inverse_rms",), linear_in=("scale", "offset"))
"""The residual `inverse_rms` is 1 / sqrt(mean(h^2) + epsilon), with centred h for "layer".

Its shape is the shape of `x` with size 1 along the axis.
"""

REFERENCE = OP.implementation()
