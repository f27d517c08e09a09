"""A short causal convolution per channel, as in Mamba and Gated DeltaNet before their scans."""

import jax.numpy as jnp

from stack_core.ops.defining import Axes, Op, OpAxes, check_floating, check_same_dtype, dispatch


def short_conv(x, weight, *, implementation=None, axes=None):
    """Convolves each channel with a separate filter: y_t = sum_k w_k x_(t-k), with x = 0 before the sequence.

    Args:
      x: [..., seq, channels].
      weight: w, [width, channels], of the dtype of `x`.

    Returns:
      y, like `x`, summed in fp32.
    """
    sizes = Axes("short_conv")
    sizes.match("x", x, "... seq channels")
    sizes.match("weight", weight, "width channels")
    check_floating("short_conv", x=x)
    check_same_dtype("short_conv", x=x, weight=weight)
    return dispatch(OP, {"x": x, "weight": weight}, {}, implementation, axes)


def _reference(x, weight, *, requested):
    seq, width = x.shape[-2], len(weight)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 2) + [(width, 0), (0, 0)])
    taps = [padded[..., width - k : width - k + seq, :] * weight[k].astype(jnp.float32) for k in range(width)]
    return sum(taps, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype), {}


def _axes(call):
    operands = {"x": "... seq channels", "weight": "width channels"}
    return OpAxes(operands, ("... seq channels",), whole=frozenset({"seq", "width"}))


OP = Op("short_conv", _reference, _axes, folds="...", linear_in=("x", "weight"))
REFERENCE = OP.implementation()
