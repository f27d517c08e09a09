"""Grouped matrix product: multiplies each row by the matrix of its group, as in a mixture of experts."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from stack_core.abi.errors import ShapeError
from stack_core.abi.ops import LowRankView, OpCall
from stack_core.ops.definitions.low_rank import LowRankArray, is_low_rank, low_rank, low_rank_view
from stack_core.ops.dispatch.check import Axes, check_floating, check_integer, check_same_dtype
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.quantized import QuantizedArray, is_quantized, logical_array
from stack_core.ops.references.ragged_tiles import cut_off, ragged_product

__all__ = ["OP", "REFERENCE", "ragged_dot"]


def ragged_dot(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "groups d_in d_out"] | QuantizedArray | LowRankArray,
    group_sizes: Integer[Array, " groups"],
    *,
    bias: Float[Array, "groups d_out"] | None = None,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "rows d_out"]:
    """Computes y_r = x_r W_g(r) + b_g(r) for rows sorted by group; group i has `group_sizes[i]` rows.

    x is `lhs`, W is `rhs`, b is `bias` (None: 0). Rows after all groups have y_r = 0 and zero
    gradient. Products are accumulated in fp32.

    Args:
      lhs: [rows, d_in], sorted by group.
      rhs: [groups, d_in, d_out], at least one group, of the dtype of `lhs`; or quantized (any class with
        `__stack_qview__`), with gradients for its scale only. With adapters (any class with `__stack_low_rank__`), the
        result is `ragged_dot` of the base weight, computed by `implementation`, plus `low_rank` with the matrices of
        each row's adapter and group.
      group_sizes: [groups], integers. Their sum may be less than `rows`; sizes in excess of `rows` are truncated.
        Negative sizes count as 0.
      bias: [groups, d_out], of any floating dtype, added to the accumulator in fp32.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      [rows, d_out], of the dtype of `lhs`.

    Raises:
      ShapeError: d_in, d_out or groups differ between the arguments, or there is no group.
      ArgumentError: non-floating operands, operands of different dtypes, or non-integer group sizes.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022 (arXiv:2211.15841).
    """
    check_integer("ragged_dot", group_sizes=group_sizes)
    if is_low_rank(rhs):
        return _with_adapters(lhs, low_rank_view(rhs), group_sizes, bias, implementation, axes)
    sizes = Axes("ragged_dot")
    sizes.match("lhs", lhs, "rows d_in")
    sizes.match("rhs", logical_array(rhs), "groups d_in d_out")
    sizes.match("group_sizes", group_sizes, "groups")
    sizes.match("bias", bias, "groups d_out")
    check_floating("ragged_dot", lhs=lhs, bias=bias)
    if not is_quantized(rhs):
        check_same_dtype("ragged_dot", lhs=lhs, rhs=rhs)
    if sizes["groups"] == 0:
        raise ShapeError("ragged_dot: axis 'groups' is 0 in rhs; expected at least one group, which may have no rows.")
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": cut_off(group_sizes, lhs.shape[0]), "bias": bias}
    return dispatch(OP, arrays, {}, implementation, axes)


def _with_adapters(
    lhs: Any, view: LowRankView, group_sizes: Any, bias: Any, implementation: Implementation, axes: LogicalNames | None
) -> Any:
    based = ragged_dot(lhs, view.base, group_sizes, bias=bias, implementation=implementation, axes=axes)
    groups = group_sizes.shape[0]
    group = jnp.searchsorted(jnp.cumsum(cut_off(group_sizes, lhs.shape[0])), jnp.arange(lhs.shape[0]), side="right")
    adapter = jnp.zeros_like(group) if view.rows is None else view.rows.astype(group.dtype)
    # One number for each pair of adapter and group, since `low_rank` selects by one index.
    rows = jnp.where(group < groups, jnp.where(adapter < 0, adapter, adapter * groups + group), -1)
    down, up = (x.reshape(-1, *x.shape[2:]) for x in (view.down, view.up))
    of_rows = None if axes is None or "lhs" not in axes else {"x": axes["lhs"]}
    return based + low_rank(lhs, down, up, jnp.repeat(view.scale, groups), rows, axes=of_rows)


def _reference(lhs: Any, rhs: Any, group_sizes: Any, *, bias: Any, requested: Any) -> tuple[Any, dict[str, Any]]:
    return ragged_product(lhs, rhs, group_sizes, bias=bias), {}


def _axes(call: OpCall) -> OpAxes:
    operands = {"lhs": "rows d_in", "rhs": "groups d_in d_out", "group_sizes": "groups", "bias": "groups d_out"}
    return OpAxes(operands, ("rows d_out",), whole=frozenset({"rows", "groups", "d_in"}))


OP = Op("ragged_dot", _reference, _axes, keeps=True, linear_in=("lhs", "rhs", "bias"))
REFERENCE = OP.implementation()
