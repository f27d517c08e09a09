"""Calls that the laboratory compiles, as shapes: an 8B Llama, a mixture of experts and a delta rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stack_core.testing import op_checks
from stack_kernels.bench.cases import Int8

__all__ = ["AXIS", "CALLS", "DEVICES", "LabCall", "calls_for"]

AXIS, DEVICES = "device", 4
"""Mesh axis and number of devices of the ops that several devices run together."""

_TOKENS, _EMBED, _MLP, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 2048, 4096, 14_336, 32, 8, 128, 128_256
_ROWS, _PAGES, _SLOTS, _EXPERTS, _RANK = 8, 256, 128, 8, 16
_ROPE_DIMS = (1, _TOKENS, _HEADS, _HEAD_DIM)


@dataclass(frozen=True)
class LabCall:
    """One call of an op.

    Attributes:
      op: name of the op.
      name: name of the call.
      arrays: array arguments by parameter name, as `jax.ShapeDtypeStruct`.
      options: the other arguments.
      gradient: arguments whose gradient is compiled too; empty for calls that only inference makes.
      parts: shardings of the arguments and of the result over the axis `AXIS`, for an op that several devices run
        together.
    """

    op: str
    name: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    gradient: tuple[str, ...] = ()
    parts: tuple[tuple[PartitionSpec, ...], PartitionSpec] | None = None


def _floats(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _attention(queries: int, keys: int, batch: int = 1) -> dict[str, Any]:
    cached = _floats(batch, keys, _KV_HEADS, _HEAD_DIM)
    return {"query": _floats(batch, queries, _HEADS, _HEAD_DIM), "key": cached, "value": cached}


def _paged(tokens: int, *, one_pool: bool = False) -> dict[str, Any]:
    sizes = (_PAGES, _SLOTS, _KV_HEADS, 2, _HEAD_DIM) if one_pool else (_PAGES, _KV_HEADS, _SLOTS, _HEAD_DIM)
    pages = _floats(*sizes)
    return {
        "query": _floats(tokens, _HEADS, _HEAD_DIM),
        "key_pages": pages,
        "value_pages": None if one_pool else pages,
        "block_tables": _integers(_ROWS, _PAGES // _ROWS),
        "kv_lengths": _integers(_ROWS),
        "query_starts": _integers(_ROWS + 1),
    }


def _int8_weight() -> Int8:
    return Int8(_floats(_EMBED, _MLP, dtype=jnp.int8), _floats(1, _MLP, dtype=jnp.float32))


def _linear_attention(groups: int = _ROPE_DIMS[2]) -> dict[str, Any]:
    heads, gate = _floats(*_ROPE_DIMS), _floats(*_ROPE_DIMS[:3], dtype=jnp.float32)
    keys = _floats(*_ROPE_DIMS[:2], groups, _ROPE_DIMS[3])
    return {"query": keys, "key": keys, "value": heads, "decay": gate, "beta": gate}


_HIDDEN, _DECODED, _UP = _floats(_TOKENS, _EMBED), _floats(_ROWS, _EMBED), _floats(_EMBED, _MLP)
_BY_DEVICE, _BY_SEQUENCE = PartitionSpec(AXIS), PartitionSpec(None, AXIS)

CALLS: tuple[LabCall, ...] = (
    LabCall("attention", "causal", _attention(_TOKENS, _TOKENS), {"causal": True}, ("query", "key", "value")),
    LabCall("paged_attention", "decode", _paged(_ROWS)),
    LabCall("paged_attention", "prefill", _paged(_TOKENS)),
    LabCall("paged_attention", "decode, one pool", _paged(_ROWS, one_pool=True), {"layout": "psh2d"}),
    LabCall("paged_attention", "prefill, one pool", _paged(_TOKENS, one_pool=True), {"layout": "psh2d"}),
    LabCall("linear", "mlp", {"x": _HIDDEN, "weight": _UP}, {}, ("x", "weight")),
    LabCall("linear", "decode, int8 weight", {"x": _DECODED, "weight": _int8_weight()}),
    LabCall("gated_linear_unit", "mlp", {"x": _HIDDEN, "w_gate": _UP, "w_up": _UP}, {}, ("x", "w_gate", "w_up")),
    LabCall(
        "gated_linear_unit",
        "decode, int8 weights",
        {"x": _DECODED, "w_gate": _int8_weight(), "w_up": _int8_weight()},
    ),
    LabCall(
        "ragged_dot",
        "experts",
        {"lhs": _HIDDEN, "rhs": _floats(_EXPERTS, _EMBED, 2048), "group_sizes": _integers(_EXPERTS)},
        {},
        ("lhs", "rhs"),
    ),
    LabCall(
        "low_rank",
        "an adapter a row",
        {
            "x": _HIDDEN,
            "down": _floats(_ROWS, _EMBED, _RANK),
            "up": _floats(_ROWS, _RANK, _MLP),
            "scale": _floats(_ROWS, dtype=jnp.float32),
            "rows": _integers(_TOKENS),
        },
        {},
        ("x", "down", "up"),
    ),
    LabCall(
        "norm",
        "rms, residual",
        {"x": _HIDDEN, "scale": _floats(_EMBED), "residual": _HIDDEN},
        {},
        ("x", "scale", "residual"),
    ),
    LabCall("rope", "queries", {"x": _floats(*_ROPE_DIMS), "positions": _integers(1, _TOKENS)}, {}, ("x",)),
    LabCall(
        "linear_cross_entropy",
        "loss",
        {"hidden": _HIDDEN, "weight": _floats(_EMBED, _VOCAB), "labels": _integers(_TOKENS)},
        {},
        ("hidden", "weight"),
    ),
    LabCall("linear_attention", "delta rule", _linear_attention(), {}, ("query", "key", "value", "decay", "beta")),
    LabCall("state_space", "mamba-2", _linear_attention(groups=1), {}, ("query", "key", "value", "decay", "beta")),
    LabCall(
        "collective_matmul",
        "all_gather",
        {"x": _floats(256, 512), "weight": _floats(512, 1024)},
        {"axis_name": AXIS},
        ("x", "weight"),
        ((_BY_DEVICE, PartitionSpec(None, AXIS)), PartitionSpec(None, AXIS)),
    ),
    LabCall(
        "exchange",
        "send",
        {"x": _floats(256, 512), "group_sizes": _integers(DEVICES * _EXPERTS)},
        {"axis_name": AXIS, "out_rows": 64},
        ("x",),
        ((_BY_DEVICE, _BY_DEVICE), _BY_DEVICE),
    ),
    LabCall(
        "ring_attention",
        "causal",
        _attention(_TOKENS, _TOKENS),
        # In this order two devices have one pair of blocks, so few kernels are compiled.
        {"axis_name": AXIS, "order": "contiguous", "causal": True},
        ("query", "key", "value"),
        ((_BY_SEQUENCE, _BY_SEQUENCE, _BY_SEQUENCE), _BY_SEQUENCE),
    ),
)


def calls_for(name: str) -> tuple[LabCall, ...]:
    """Returns the calls that are compiled for an implementation, "op/name".

    A reference, which XLA compiles slowly in large loops, has only the first call of its op's contract.
    """
    op, _, implementation = name.partition("/")
    found = tuple(call for call in CALLS if call.op == op)
    if implementation != "reference" or not found or found[0].parts is not None:
        return found
    case = op_checks(op)[0].case
    arrays = {
        name: _floats(*x.shape) if x.dtype == np.float64 else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in case.arrays(np.random.default_rng(0)).items()
    }
    moving = tuple(name for name, x in arrays.items() if x.dtype == jnp.bfloat16 and name not in case.fixed)
    return (LabCall(op, f"the contract's {case.name!r}", arrays, case.options, moving),)
