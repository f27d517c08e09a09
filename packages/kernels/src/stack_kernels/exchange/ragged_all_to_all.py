"""`exchange` on TPUs and GPUs: `jax.lax.ragged_all_to_all`, which moves each row once.

A device's rows for one group form one slice. A table of all devices' group sizes gives the offset of each slice on the
device that owns the rows and in the buffer of the device that owns the group. "send" copies from the rows to the
buffer, "return" copies back.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import BackwardCall, as_backward, vary_alike

__all__ = ["RAGGED_ALL_TO_ALL", "ragged_all_to_all"]


def ragged_all_to_all(*, interpret: bool = False) -> OpImplementation:
    """Builds the implementation; the interpreted one moves slices through an all-gather, on any device."""
    collective = _interpreted if interpret else lax.ragged_all_to_all

    def forward(
        *, x: Any, group_sizes: Any, axis_name: Any, out_rows: int, kind: str, requested: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        return _exchanged(x, group_sizes, axis_name, out_rows, kind, collective), {}

    @as_backward
    def backward(call: BackwardCall) -> Mapping[str, Any]:
        opposite = {"send": "return", "return": "send"}[call.options["kind"]]
        x, sizes = call.arrays["x"], call.arrays["group_sizes"]
        return {"x": _exchanged(call.cotangents, sizes, call.options["axis_name"], len(x), opposite, collective)}

    return OpImplementation("exchange", "ragged_all_to_all", forward, backward, platforms=("tpu", "gpu"))


class _Slices(NamedTuple):
    """Offsets of the slices in the rows and in the buffer, and their sizes, int32[devices, groups]."""

    rows: Any
    buffer: Any
    sizes: Any


def _exchanged(x: Any, group_sizes: Any, axis_name: Any, out_rows: int, kind: str, collective: Any) -> Any:
    x, group_sizes, me = vary_alike(x, group_sizes.astype(jnp.int32), lax.axis_index(axis_name))
    sizes = lax.all_gather(group_sizes, axis_name)
    devices, groups = sizes.shape
    rows, buffer = (len(x), out_rows) if kind == "send" else (out_rows, len(x))
    slices = _slices(sizes, rows, buffer)
    own = groups // devices
    of_rows = _Slices(*(lax.dynamic_index_in_dim(table, me, keepdims=False) for table in slices))
    of_buffer = _Slices(*(lax.dynamic_slice_in_dim(table, me * own, own, axis=1).reshape(-1) for table in slices))
    # The collective does not write rows outside the slices, and those must be zero.
    empty = vary_alike(jnp.zeros_like(x, shape=(out_rows, x.shape[1])), x)[0]
    # (offsets in x, sizes to send, offsets on the receiver, sizes to receive)
    if kind == "send":
        places = of_rows.rows, of_rows.sizes, of_rows.buffer, of_buffer.sizes
    else:
        places = of_buffer.buffer, of_buffer.sizes, of_buffer.rows, of_rows.sizes
    return collective(x, empty, *places, axis_name=axis_name)


def _slices(sizes: Any, rows: int, buffer: int) -> _Slices:
    """Computes the slices, cut off at the end of the rows or the buffer, to keep all accesses within bounds."""
    devices, groups = sizes.shape
    starts = jnp.cumsum(sizes, axis=1) - sizes
    # In a buffer, the slices of a group follow each other in the order of the senders.
    by_receiver = sizes.T.reshape(devices, -1)  # [receiver, its groups * senders]
    places = (jnp.cumsum(by_receiver, axis=1) - by_receiver).reshape(groups, devices).T
    starts, places = jnp.clip(starts, 0, rows), jnp.clip(places, 0, buffer)
    return _Slices(starts, places, jnp.clip(sizes, 0, jnp.minimum(rows - starts, buffer - places)))


def _interpreted(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: Any,
) -> Any:
    """Emulates `jax.lax.ragged_all_to_all` slice by slice; NaN if the two sides disagree on a size."""
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    operands, inputs, sizes, outputs = (
        lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
    )
    slices = len(input_offsets) // devices
    out_row = jnp.arange(len(output))

    def received(index: Any, result: Any) -> Any:
        sender, number = index // slices, me * slices + index % slices
        start, place, sent = (table[sender, number] for table in (inputs, outputs, sizes))
        # The larger size, to show NaN in rows that only one side expects.
        size = jnp.maximum(sent, recv_sizes[index])
        taken = operands[sender].at[out_row - place + start].get(mode="clip")
        taken = jnp.where(sent == recv_sizes[index], taken, jnp.nan)
        return jnp.where(((out_row >= place) & (out_row < place + size))[:, None], taken, result)

    return lax.fori_loop(0, devices * slices, received, output)


RAGGED_ALL_TO_ALL = ragged_all_to_all()
