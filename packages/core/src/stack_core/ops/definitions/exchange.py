"""All-to-all of expert parallelism: sends rows to the devices of their groups and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import OpCall
from stack_core.ops.dispatch.check import Axes, axis_size, check_floating, check_integer, check_known
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames

__all__ = ["OP", "REFERENCE", "exchange", "received_sizes"]

_KINDS = ("send", "return")


def exchange(
    x: Float[Array, "rows d"],
    group_sizes: Integer[Array, " groups"],
    *,
    axis_name: str | tuple[str, ...],
    out_rows: int,
    kind: str = "send",
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "out_rows d"]:
    """Sends rows to the devices that own their groups, or returns the results, inside `jax.shard_map`.

    Device i of n along `axis_name` owns the groups from i g / n to (i + 1) g / n. The rows of each device are sorted by
    group, with `group_sizes` rows in each of the g groups.

        send:    y = rows of all devices for this device's groups, ordered by group and, within a group, by sending
                 device; truncated to `out_rows` or padded with zeros
        return:  y = this device's rows from all devices, each at its position before "send"; 0 for rows that were
                 truncated or belong to no group

    "send" and "return" are transposes, and thus gradients, of each other, and inverses if no row is truncated. Shapes
    are static, so the caller chooses the buffer size `out_rows`: n * rows is always sufficient, and rows is sufficient
    if the groups are balanced. `received_sizes` returns the sizes of the received groups and counts the truncated rows:

        received = ops.exchange(rows, sizes, axis_name="expert", out_rows=buffer)
        own_sizes, dropped = ops.received_sizes(sizes, axis_name="expert", out_rows=buffer)
        products = ops.ragged_dot(received, weights_of_this_device, own_sizes)
        returned = ops.exchange(products, sizes, axis_name="expert", out_rows=len(rows), kind="return")

    The reference gathers the rows of all devices on each device, n * rows * d numbers, because XLA's CPU backend has no
    ragged all-to-all.

    Args:
      x: "send": this device's rows, [rows, d], sorted by group; rows after all groups are not sent. "return":
        one row for each row of the result of "send", [buffer, d].
      group_sizes: [groups], non-negative integers, the group sizes of this device's rows before "send"; the same for
        both kinds. If their sum exceeds the rows of `x`, the missing rows arrive as zeros.
      axis_name: mesh axis or axes that shard the groups.
      out_rows: number of rows of the result, at least 1: the buffer size for "send", the rows of `x` before "send" for
        "return".
      kind: "send" or "return".
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      y, [out_rows, d], of the dtype of `x`.

    Raises:
      ShapeError: n does not divide the groups.
      ArgumentError: wrong dtypes, `out_rows` below 1, or an `axis_name` that no surrounding `jax.shard_map` has.
      UnknownName: unknown kind.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: Lepikhin et al., GShard, 2020 (arXiv:2006.16668), without expert capacities; the ragged form follows
    `jax.lax.ragged_all_to_all`.
    """
    sizes = Axes("exchange")
    sizes.match("x", x, "rows d")
    check_floating("exchange", x=x)
    check_known("exchange", "kind", kind, _KINDS)
    _check_sizes("exchange", group_sizes, axis_name, out_rows)
    options = {"axis_name": axis_name, "out_rows": out_rows, "kind": kind}
    return dispatch(OP, {"x": x, "group_sizes": group_sizes}, options, implementation, axes)


def received_sizes(
    group_sizes: Integer[Array, " groups"], *, axis_name: str | tuple[str, ...], out_rows: int
) -> tuple[Int[Array, " own_groups"], Int[Array, ""]]:
    """Computes the group sizes that this device receives if all devices call `exchange` with these arguments.

    Returns:
      Sizes of this device's groups in the order of the received rows, int32[groups / n], with a sum of at most
      `out_rows`; and the number of truncated rows, int32[].

    Raises:
      ShapeError, ArgumentError: as `exchange`.
    """
    devices = _check_sizes("received_sizes", group_sizes, axis_name, out_rows)
    own = group_sizes.shape[0] // devices
    everyones = _everyones(group_sizes, axis_name)
    mine = lax.dynamic_slice_in_dim(everyones, lax.axis_index(axis_name) * own, own, axis=1)
    ends = jnp.cumsum(jnp.sum(mine, axis=0), dtype=jnp.int32)
    return jnp.diff(jnp.minimum(ends, out_rows), prepend=0), jnp.maximum(ends[-1] - out_rows, 0)


def _check_sizes(op: str, group_sizes: Any, axis_name: Any, out_rows: int) -> int:
    """Checks the arguments and returns the number of devices."""
    sizes = Axes(op)
    sizes.match("group_sizes", group_sizes, "groups")
    check_integer(op, group_sizes=group_sizes)
    if out_rows < 1:
        raise ArgumentError(f"{op}: out_rows is {out_rows}; expected at least 1, the rows of the result.")
    devices = axis_size(op, axis_name)
    if sizes["groups"] % devices or not sizes["groups"]:
        raise ShapeError(
            f"{op}: axis 'groups' is {sizes['groups']} in group_sizes, and {axis_name!r} spans {devices} devices; "
            "expected a multiple, so that each keeps equally many groups."
        )
    return devices


def _reference(
    x: Any, group_sizes: Any, *, axis_name: Any, out_rows: int, kind: str, requested: Any
) -> tuple[Any, dict[str, Any]]:
    if x.size == 0:  # XLA lacks collectives along empty axes.
        return jnp.zeros_like(x, shape=(out_rows, x.shape[1])), {}
    function = _plain_exchange if is_plain() else _exchange
    # Each device gets other rows, so the operands must vary over the axis, too.
    return function(kind, axis_name, out_rows, *vary_alike(x, group_sizes, lax.axis_index(axis_name))[:2]), {}


def _plain_exchange(kind: str, axis_name: Any, out_rows: int, x: Any, group_sizes: Any) -> Any:
    everyones = _everyones(group_sizes, axis_name)
    find = _arriving if kind == "send" else _returning
    device, row, exists = find(everyones, lax.axis_index(axis_name), out_rows)
    gathered = lax.all_gather(x, axis_name)
    # Rows that do not exist are clipped here and set to 0 below.
    taken = gathered.at[device, row].get(mode="clip")
    return jnp.where((exists & (row < x.shape[0]))[:, None], taken, 0)


# JAX's derivative would scatter the gradients of all rows on every device; the opposite exchange only moves rows.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchange(kind: str, axis_name: Any, out_rows: int, x: Any, group_sizes: Any) -> Any:
    return _plain_exchange(kind, axis_name, out_rows, x, group_sizes)


def _forward(kind: str, axis_name: Any, out_rows: int, x: Any, group_sizes: Any) -> Any:
    return _exchange(kind, axis_name, out_rows, x, group_sizes), (group_sizes, x.shape[0])


def _backward(kind: str, axis_name: Any, out_rows: int, residuals: Any, cotangent: Any) -> Any:
    group_sizes, rows = residuals
    opposite = _KINDS[1 - _KINDS.index(kind)]
    return _exchange(opposite, axis_name, rows, cotangent, group_sizes), None


_exchange.defvjp(_forward, _backward)


def _everyones(group_sizes: Any, axis_name: Any) -> Any:
    """Gathers the group sizes of every device, int32[devices, groups]."""
    sizes = vary_alike(group_sizes.astype(jnp.int32), lax.axis_index(axis_name))[0]
    return lax.all_gather(sizes, axis_name)


def _arriving(everyones: Any, me: Any, out_rows: int) -> tuple[Any, Any, Any]:
    """Returns for each row of this device's buffer: its sender, its index on the sender, and whether it exists."""
    devices, groups = everyones.shape
    starts = jnp.cumsum(everyones, axis=1) - everyones
    own = groups // devices
    sizes, starts = (lax.dynamic_slice_in_dim(x, me * own, own, axis=1).T.reshape(-1) for x in (everyones, starts))
    block, within, exists = _places(sizes, out_rows)
    return block % devices, starts[block] + within, exists


def _returning(everyones: Any, me: Any, out_rows: int) -> tuple[Any, Any, Any]:
    """Returns for each row of this device: its receiver, its index on the receiver, and whether it was sent."""
    devices, groups = everyones.shape
    group, within, exists = _places(everyones[me], out_rows)
    by_receiver = everyones.T.reshape(devices, -1)  # [receiver, its groups * senders]
    starts = (jnp.cumsum(by_receiver, axis=1) - by_receiver).reshape(groups, devices)[:, me]
    return group // (groups // devices), starts[group] + within, exists


def _places(sizes: Any, rows: int) -> tuple[Any, Any, Any]:
    """Returns for each row of consecutive blocks: its block, its index within the block, and whether it is in any."""
    ends, row = jnp.cumsum(sizes, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    # The side skips empty blocks, which end where the previous block ends.
    block = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(sizes) - 1)
    return block, row - (ends - sizes)[block], row < ends[-1]


def _axes(call: OpCall) -> OpAxes:
    return OpAxes({"x": "rows d", "group_sizes": "groups"}, ("out_rows d",), whole=frozenset({"rows", "groups"}))


OP = Op("exchange", _reference, _axes, keeps=True, linear_in=("x",))
REFERENCE = OP.implementation()
"""Gathers all rows and selects: more communication than necessary, but works on any backend."""
