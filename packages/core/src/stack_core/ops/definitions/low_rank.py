"""Low-rank products with one adapter per row, as LoRA adds them to a linear map."""

import math
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import ABI_MAJOR, LowRankView, OpCall
from stack_core.ops.dispatch.check import Axes, check_floating, check_integer, check_same_dtype
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.quantized import logical_array
from stack_core.ops.references.ragged_tiles import ragged_product

__all__ = ["OP", "REFERENCE", "LowRankArray", "is_low_rank", "low_rank", "low_rank_view"]


@runtime_checkable
class LowRankArray(Protocol):
    """Protocol of weights with adapters, described by a `LowRankView`."""

    def __stack_low_rank__(self) -> LowRankView: ...


def low_rank(
    x: Float[Array, "*batch d_in"],
    down: Float[Array, "adapters d_in rank"],
    up: Float[Array, "adapters rank d_out"],
    scale: Float[Array, " adapters"],
    rows: Integer[Array, "..."] | None = None,
    *,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*batch d_out"]:
    """Computes y_r = s_a x_r D_a U_a, where a is the adapter of row r.

    Both products are accumulated in fp32. The intermediate s_a x_r D_a is rounded to the dtype of `x`. The cost depends
    on the number of rows and not on the number of adapters.

    Args:
      x: [..., d_in].
      down: D, [adapters, d_in, rank], at least one adapter, of the dtype of `x`.
      up: U, [adapters, rank, d_out], likewise.
      scale: s, [adapters], of any floating dtype; alpha / rank in LoRA.
      rows: adapter of each row of `x`: integers with the shape of all or the first of its leading axes, for example
        [batch] for [batch, seq, d_in]. -1 means no adapter and gives 0. Other numbers out of range give NaN. None means
        adapter 0 for all rows.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      [..., d_out], of the dtype of `x`.

    Raises:
      ShapeError: sizes differ between the arguments, or there is no adapter.
      ArgumentError: non-floating operands, operands of different dtypes, or non-integer rows.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021 (arXiv:2106.09685); Chen et al., Punica:
    Multi-Tenant LoRA Serving, 2023 (arXiv:2310.18547).
    """
    sizes = Axes("low_rank")
    sizes.match("x", x, "... d_in")
    sizes.match("down", down, "adapters d_in rank")
    sizes.match("up", up, "adapters rank d_out")
    sizes.match("scale", scale, "adapters")
    check_floating("low_rank", x=x, scale=scale)
    check_same_dtype("low_rank", x=x, down=down, up=up)
    if sizes["adapters"] == 0:
        raise ShapeError("low_rank: axis 'adapters' is 0 in down; expected at least one.")
    if rows is not None:
        check_integer("low_rank", rows=rows)
        if rows.ndim >= x.ndim or rows.shape != x.shape[: rows.ndim]:
            raise ShapeError(
                f"low_rank: rows has shape {rows.shape}, but x {x.shape}; expected {x.shape[:-1]}, the leading axes of "
                "x, or the first of them."
            )
    arrays = {"x": x, "down": down, "up": up, "scale": scale, "rows": rows}
    return dispatch(OP, arrays, {}, implementation, axes)


def _reference(x: Any, down: Any, up: Any, scale: Any, *, rows: Any, requested: Any) -> tuple[Any, dict[str, Any]]:
    batch, d_out = x.shape[:-1], up.shape[-1]
    flat = x.reshape(math.prod(batch), x.shape[-1])
    if rows is None:
        inner = contract("ni,ir->nr", flat, down[0], accurate_dtype(x.dtype))
        inner = (inner * scale[0].astype(inner.dtype)).astype(x.dtype)
        return contract("nr,ro->no", inner, up[0], x.dtype).reshape(*batch, d_out), {}
    rows = jnp.broadcast_to(rows.reshape(*rows.shape, *[1] * (len(batch) - rows.ndim)), batch).reshape(-1)
    return _by_adapter(flat, down, up, scale, rows).reshape(*batch, d_out), {}


def _by_adapter(x: Any, down: Any, up: Any, scale: Any, rows: Any) -> Any:
    """Computes [n, d_out] by two ragged products over rows sorted by adapter; rows without adapter come last."""
    adapters, accurate = down.shape[0], accurate_dtype(x.dtype)
    exists = (rows >= 0) & (rows < adapters)
    # One past the last adapter sorts these rows behind all groups.
    adapter = jnp.where(exists, rows, adapters)
    order = jnp.argsort(adapter, stable=True)
    sizes = jnp.sum(adapter[:, None] == jnp.arange(adapters), axis=0, dtype=jnp.int32)
    inner = ragged_product(x[order], down, sizes).astype(accurate)
    # Rows without an adapter get an arbitrary scale, but their product is 0.
    scales = jnp.take(scale.astype(accurate), adapter[order], mode="clip")
    outer = ragged_product((inner * scales[:, None]).astype(x.dtype), up, sizes)
    # A permutation: XLA may write the rows in parallel.
    unsorted = jnp.zeros_like(outer).at[order].set(outer, unique_indices=True)
    return jnp.where((exists | (rows == -1))[:, None], unsorted, jnp.nan)


def is_low_rank(array: Any) -> bool:
    """Returns whether the type of `array` defines `__stack_low_rank__`."""
    return hasattr(type(array), "__stack_low_rank__")


def low_rank_view(array: Any) -> LowRankView:
    """Returns the checked view of a weight with adapters.

    Raises:
      ArgumentError: the view has another ABI major version.
      ShapeError: shapes of the matrices do not match the base weight.
    """
    view, name = array.__stack_low_rank__(), type(array).__name__
    if view.abi[0] != ABI_MAJOR:
        raise ArgumentError(
            f"The view of {name} is of ABI {view.abi[0]}.{view.abi[1]}; this core reads ABI {ABI_MAJOR}. "
            "Install a matching release of the package that defines it."
        )
    *lead, d_in, d_out = logical_array(view.base).shape
    # 0 for a scalar, which the comparison below rejects by name.
    adapters, rank = (*view.scale.shape, 0)[0], view.down.shape[-1]
    expected = {
        "down": (adapters, *lead, d_in, rank),
        "up": (adapters, *lead, rank, d_out),
        "scale": (adapters,),
    }
    for part, shape in expected.items():
        found = getattr(view, part).shape
        if found != shape:
            raise ShapeError(
                f"The {part} of {name} has shape {found}; expected {shape}, for a base of {(*lead, d_in, d_out)}."
            )
    return view


def _axes(call: OpCall) -> OpAxes:
    rows, leading = call.arrays["rows"], len(call.arrays["x"].shape) - 1
    # If `rows` has fewer leading axes than `x`, axes cannot be folded and the rows of x cannot be split.
    fits = rows is None or len(rows.shape) == leading
    names = "..." if fits else " ".join(f"lead{number}" for number in range(leading))
    of_rows = names if fits else " ".join(names.split()[: len(rows.shape)])
    operands = {
        "x": f"{names} d_in",
        "down": "adapters d_in rank",
        "up": "adapters rank d_out",
        "scale": "adapters",
        "rows": of_rows,
    }
    return OpAxes(operands, (f"{names} d_out",), whole=frozenset({"d_in", "rank", "adapters"}))


OP = Op("low_rank", _reference, _axes, folds="...", linear_in=("x", "down", "up", "scale"))
REFERENCE = OP.implementation()
"""Two products, which are ragged if `rows` is given."""
