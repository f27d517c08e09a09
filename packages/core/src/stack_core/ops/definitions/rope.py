"""Rotary position embedding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ArgumentError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import Axes, check_floating, check_integer, check_positive, check_static
from stack_core.ops.dispatch.contract import accurate_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.rope_scaling import RopeScalingMethod, unscaled_frequencies

__all__ = ["OP", "REFERENCE", "rope", "rope_angles", "rotated"]


def rope(
    x: Float[Array, "*batch seq heads head_dim"],
    positions: Int[Array, "*batch seq"],
    *,
    theta: float = 10_000.0,
    scaling: RopeScalingMethod | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Rotates pairs of features by angles proportional to the position.

        y_a = x_a cos(p f_i) - x_b sin(p f_i)
        y_b = x_b cos(p f_i) + x_a sin(p f_i)            f_i = theta^(-2i / r), i = 0 ... r/2 - 1

    p is the position and r is `rotary_dim`; the pair (a, b) of index i is (i, i + r/2), or (2i, 2i + 1) if
    `interleaved`. Features from r on pass unchanged. Angles and rotation are computed in fp32.

    Args:
      x: [..., seq, heads, head_dim], queries or keys.
      positions: [..., seq], integers.
      theta: base of the frequencies.
      scaling: scaling of the frequencies for longer contexts: `LinearScaling`, `DynamicScaling`, `Llama3Scaling`,
        `YarnScaling`, `LongRopeScaling`, `ProportionalScaling`, or another hashable object with a `frequencies` method.
        None: unscaled.
      interleaved: whether adjacent features form pairs (GPT-J) instead of the two halves (GPT-NeoX, Llama).
      rotary_dim: number of rotated leading features, even; by default head_dim.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, used to shard implementations that XLA cannot partition:
        {"x": ("batch", "seq", "heads", None)}.

    Returns:
      y, like `x`.

    Raises:
      ShapeError: the shape of `positions` differs from the leading axes of `x`.
      ArgumentError: `x` is not floating, `positions` is not integer, or `rotary_dim` is odd or exceeds head_dim.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Su et al., RoFormer, 2021 (arXiv:2104.09864).
    """
    sizes = Axes("rope")
    sizes.match("x", x, "... seq heads head_dim")
    sizes.match("positions", positions, "... seq")
    check_floating("rope", x=x)
    check_positive("rope", theta=theta)
    check_static("rope", rotary_dim=rotary_dim)
    check_integer("rope", positions=positions)
    rotary_dim = sizes["head_dim"] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= sizes["head_dim"]:
        raise ArgumentError(
            f"rope: rotary_dim is {rotary_dim}; expected an even number between 2 and head_dim={sizes['head_dim']}."
        )
    options = {"theta": theta, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim}
    return dispatch(OP, {"x": x, "positions": positions}, options, implementation, axes)


def _reference(
    x: Any, positions: Any, *, theta: float, scaling: Any, interleaved: bool, rotary_dim: int, requested: Any
) -> tuple[Any, dict[str, Any]]:
    angles, factor = rope_angles(positions, theta=theta, scaling=scaling, rotary_dim=rotary_dim)
    return rotated(x, factor * jnp.cos(angles), factor * jnp.sin(angles), interleaved=interleaved), {}


def rope_angles(positions: Any, *, theta: float, scaling: Any, rotary_dim: int) -> tuple[Any, Any]:
    """Computes fp32 angles [..., seq, 1, rotary_dim / 2] of positions [..., seq], and the factor on cosine and sine."""
    if scaling is None:
        frequencies, factor = unscaled_frequencies(theta, rotary_dim), 1.0
    else:
        frequencies, factor = scaling.frequencies(theta, rotary_dim, positions)
    return positions[..., None, None].astype(jnp.float32) * frequencies, factor


def rotated(x: Any, cosine: Any, sine: Any, *, interleaved: bool) -> Any:
    """Rotates the leading features of x[..., seq, heads, head_dim], two for each angle in the tables."""
    dtype, rotary_dim = accurate_dtype(x.dtype), 2 * cosine.shape[-1]
    cosine, sine = cosine.astype(dtype), sine.astype(dtype)
    # Only the rotated features are cast; the rest passes bit by bit.
    turning, rest = x[..., :rotary_dim].astype(dtype), x[..., rotary_dim:]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    pair = (first * cosine - second * sine, second * cosine + first * sine)
    turned = jnp.stack(pair, axis=-1).reshape(turning.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _axes(call: OpCall) -> OpAxes:
    operands = {"x": "... seq heads head_dim", "positions": "... seq"}
    # A scaling may depend on the last position of a row, so the sequence must not be split.
    whole = {"head_dim"} if call.options["scaling"] is None else {"head_dim", "seq"}
    return OpAxes(operands, ("... seq heads head_dim",), whole=frozenset(whole))


OP = Op("rope", _reference, _axes, folds="...", linear_in=("x",))
REFERENCE = OP.implementation()
