"""Matrix product combined with the collective for operands sharded over a mesh axis."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from stack_core.abi.errors import ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import Axes, axis_size, check_floating, check_known, check_same_dtype
from stack_core.ops.dispatch.contract import contract
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.quantized import QuantizedArray, dequantize, is_quantized, logical_array

__all__ = ["OP", "REFERENCE", "collective_matmul"]


def collective_matmul(
    x: Float[Array, "*batch rows d_in"],
    weight: Float[Array, "d_in d_out"] | QuantizedArray,
    *,
    axis_name: str | tuple[str, ...],
    kind: str = "all_gather",
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*batch out_rows d_out"]:
    """Computes one half of a tensor-parallel block on sharded operands, inside `jax.shard_map`.

        all_gather:      y_i = concatenate(x_0, ..., x_(n-1)) W_i       rows of all devices, columns of this device
        reduce_scatter:  y_i = rows_i(sum_j x_j W_j)                    products of all devices, rows of this device

    i and j are two of the n devices along `axis_name`; x_i and W_i are the arguments of device i. The rows are the
    second-to-last axis of x and y. Device i holds block i of n equal blocks of the sharded rows.

    Products are accumulated in fp32 and rounded to the dtype of `x` before the sum over devices, as in Megatron-LM and
    in XLA's partitioner: sums in fp32 would double the traffic. The gradient of "all_gather" gathers again instead of
    keeping the rows of all devices.

    Args:
      x: "all_gather": this device's block of the rows, [..., rows / n, d_in]. "reduce_scatter": all rows of this
        device's columns, [..., rows, d_in / n].
      weight: W, of the dtype of `x`. "all_gather": this device's columns, [d_in, d_out / n], or all columns.
        "reduce_scatter": the rows for this device's columns of `x`, [d_in / n, d_out]. It may be quantized (any class
        with `__stack_qview__`).
      axis_name: mesh axis or axes to gather or reduce over.
      kind: "all_gather" or "reduce_scatter".
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      y, of the dtype of `x`: [..., rows, d_out / n] for "all_gather", [..., rows / n, d_out] for "reduce_scatter".

    Raises:
      ShapeError: d_in differs between the arguments, or n does not divide the rows to scatter.
      ArgumentError: wrong dtypes, or an `axis_name` that no surrounding `jax.shard_map` has.
      UnknownName: unknown kind.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022 (arXiv:2205.05198),
    section 4.2.2; for implementations with overlap, Wang et al., Overlap Communication with Dependent Computation via
    Decomposition in Large Deep Learning Models, ASPLOS 2023.
    """
    sizes = Axes("collective_matmul")
    sizes.match("x", x, "... rows d_in")
    sizes.match("weight", logical_array(weight), "d_in d_out")
    check_floating("collective_matmul", x=x)
    if not is_quantized(weight):
        check_same_dtype("collective_matmul", x=x, weight=weight)
    check_known("collective_matmul", "kind", kind, ("all_gather", "reduce_scatter"))
    devices = axis_size("collective_matmul", axis_name)
    if kind == "reduce_scatter" and sizes["rows"] % devices:
        fewer = sizes["rows"] // devices * devices
        raise ShapeError(
            f"collective_matmul: axis 'rows' is {sizes['rows']} in x, and {axis_name!r} spans {devices} devices; "
            f"expected a multiple, to scatter equal blocks. Pad x to {fewer + devices} rows"
            + (f" or cut it to {fewer}." if fewer else ".")
        )
    arrays = {"x": x, "weight": weight}
    return dispatch(OP, arrays, {"axis_name": axis_name, "kind": kind}, implementation, axes)


def _reference(x: Any, weight: Any, *, axis_name: Any, kind: str, requested: Any) -> tuple[Any, dict[str, Any]]:
    weight = dequantize(weight, x.dtype)
    rows = x.ndim - 2
    if x.shape[rows] == 0:  # XLA lacks collectives along empty axes.
        return _product(x, weight), {}
    if kind == "reduce_scatter":
        return lax.psum_scatter(_product(x, weight), axis_name, scatter_dimension=rows, tiled=True), {}

    @jax.checkpoint
    def gathered_product(x: Any, weight: Any) -> Any:
        return _product(lax.all_gather(x, axis_name, axis=rows, tiled=True), weight)

    return gathered_product(x, weight), {}


def _product(x: Any, weight: Any) -> Any:
    product = contract("ni,io->no", x.reshape(-1, x.shape[-1]), weight, x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[-1])


def _axes(call: OpCall) -> OpAxes:
    # The surrounding `shard_map` has split these axes already.
    operands = {"x": "... rows d_in", "weight": "d_in d_out"}
    return OpAxes(operands, ("... out_rows d_out",), whole=frozenset({"rows", "d_in", "out_rows"}))


OP = Op("collective_matmul", _reference, _axes, folds="...", keeps=True, linear_in=("x", "weight"))
REFERENCE = OP.implementation()
"""Plain collectives before or after the product, without overlap."""
