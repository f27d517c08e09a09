"""Operands are such as a real call might have; and what tells calls apart."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import OpCall, QView
from stack_kernels.tuning.operands import draw_operands
from stack_kernels.tuning.shapes import bucket_of, shape_of


def F(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:  # noqa: N802 - as short as the tables that it is for
    return jax.ShapeDtypeStruct(shape, dtype)


I = functools.partial(F, dtype="int32")  # noqa: E741 - likewise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    codes: Any
    scales: Any
    zeros: Any = None
    codebook: Any = None

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.codes, self.scales, self.zeros, "coded", self.codebook)


QKV = {"query": F(2, 24, 4, 8), "key": F(2, 40, 2, 8), "value": F(2, 40, 2, 8)}
PAGES = {"key_pages": F(6, 2, 4, 8), "value_pages": F(6, 2, 4, 8)}
PLACES = {"block_tables": I(3, 4), "kv_lengths": I(3), "query_starts": I(4)}
CALLS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "attention": ("attention", QKV, {"causal": True}),
    "attention with all": (
        "attention",
        {
            **QKV,
            "segment_ids": (I(2, 24), I(2, 40)),
            "kv_lengths": I(2),
            "query_offset": I(2),
            "mask": F(1, 1, 24, 40, dtype="bool"),
            "bias": F(2, 4, 24, 40),
            "sinks": F(4),
        },
        {"window": (8, None), "softcap": 5.0},
    ),
    "gated_linear_unit": ("gated_linear_unit", {"x": F(3, 8), "w_gate": F(8, 4), "w_up": F(8, 4)}, {}),
    "linear": ("linear", {"x": F(2, 3, 8), "weight": F(8, 4), "bias": F(4)}, {}),
    "linear of codes": (
        "linear",
        {"x": F(3, 8), "weight": Coded(F(8, 4, dtype="int8"), F(2, 4), F(2, 4, dtype="int8"))},
        {},
    ),
    "linear of levels": ("linear", {"x": F(3, 8), "weight": Coded(F(8, 4, dtype="uint4"), F(1, 4), None, F(16))}, {}),
    "linear_attention": (
        "linear_attention",
        {"query": F(1, 9, 2, 4), "key": F(1, 9, 2, 4), "value": F(1, 9, 2, 6), "decay": F(1, 9, 2), "beta": F(1, 9, 2)},
        {},
    ),
    "linear_cross_entropy": ("linear_cross_entropy", {"hidden": F(7, 8), "weight": F(8, 50), "labels": I(7)}, {}),
    "norm": ("norm", {"x": F(3, 8), "scale": F(8)}, {}),
    "paged_attention": ("paged_attention", {"query": F(5, 4, 8), **PAGES, **PLACES}, {}),
    "paged_attention of codes": (
        "paged_attention",
        {
            "query": F(5, 4, 8),
            **dict.fromkeys(PAGES, Coded(F(6, 4, 2, 8, dtype="int8"), F(6, 4, 2, 1))),
            **PLACES,
        },
        {"layout": "pshd"},
    ),
    "ragged_dot": ("ragged_dot", {"lhs": F(17, 8), "rhs": F(4, 8, 6), "group_sizes": I(4)}, {}),
    "rope": ("rope", {"x": F(2, 9, 2, 8), "positions": I(2, 9)}, {}),
}


def _traced(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> OpCall:
    (explained,) = ops.explain(lambda arrays: getattr(ops, op)(**arrays, **options), arrays)
    return explained.call


@functools.cache
def _call(name: str) -> OpCall:
    return _traced(*CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_operands_have_the_shapes_that_are_asked_and_give_finite_results(name: str) -> None:
    call = _call(name)
    arrays = draw_operands(call)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    assert structs == call.arrays
    output = jax.jit(lambda arrays: getattr(ops, call.op)(**arrays, **CALLS[name][2]))(
        {argument: arrays[argument] for argument in CALLS[name][1]}
    )
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(output))
    again = draw_operands(call)
    assert all(np.array_equal(*pair) for pair in zip(jax.tree.leaves(arrays), jax.tree.leaves(again), strict=True))


def test_integers_are_valid() -> None:
    labels = draw_operands(
        _traced("linear_cross_entropy", {**CALLS["linear_cross_entropy"][1], "hidden": F(900, 8), "labels": I(900)}, {})
    )["labels"]
    counted = labels[labels != -100]
    assert 0 < 900 - counted.size < 200
    assert (counted.min(), counted.max()) == (0, 49)
    assert int(draw_operands(_call("ragged_dot"))["group_sizes"].sum()) == 17
    paged = draw_operands(_call("paged_attention"))
    assert set(np.unique(paged["block_tables"])) == set(range(6))
    assert np.all((paged["kv_lengths"] >= 8) & (paged["kv_lengths"] <= 16))
    assert list(paged["query_starts"]) == [0, 1, 2, 3]
    attention = draw_operands(_call("attention with all"))
    assert np.all((attention["kv_lengths"] >= 20) & (attention["kv_lengths"] <= 40))
    assert list(attention["query_offset"]) == [16, 16]
    for ids in attention["segment_ids"]:
        assert np.all(np.diff(ids) >= 0) and set(np.unique(ids)) == {1, 2, 3, 4}
    assert 0.8 < attention["mask"].mean() < 1
    assert list(draw_operands(_call("rope"))["positions"][1]) == list(range(9))


def test_scales_are_positive_and_codes_use_their_range() -> None:
    weight = draw_operands(_traced("linear", {"x": F(3, 64), "weight": Coded(F(64, 64, dtype="int8"), F(1, 64))}, {}))[
        "weight"
    ]
    assert (weight.codes.min(), weight.codes.max()) == (-128, 127)
    assert np.all(weight.scales > 0)


@pytest.mark.parametrize("name", CALLS)
def test_every_op_has_a_shape_of_named_sizes(name: str) -> None:
    call = _call(name)
    shape = shape_of(call)
    assert all(isinstance(size, int) for _, size in shape.sizes)
    assert shape.distance(shape) == 0
    assert shape.traffic_bytes > 0
    hash(shape)


def test_sizes_and_traits_of_an_attention() -> None:
    shape = shape_of(_call("attention with all"))
    assert dict(shape.sizes) == {
        "batch": 2,
        "q_seq": 24,
        "heads": 4,
        "head_dim": 8,
        "kv_seq": 40,
        "kv_heads": 2,
        "value_dim": 8,
        "window[0]": 8,
    }
    assert dict(shape.traits) == {
        "query": "float32",
        "key": "float32",
        "value": "float32",
        "bias": "float32 nxnxnxn",
        "mask": "bool 1x1xnxn",
        "segment_ids": "int32 int32",
        "kv_lengths": "int32",
        "query_offset": "int32",
        "sinks": "float32",
        "window[1]": "open",
        "softcap": "given",
        "scale": "given",
    }


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("linear of codes", "int8, scale float32 4x1, zero point int8"),
        ("linear of levels", "uint4, scale float32 allx1, 16 levels"),
    ],
)
def test_how_an_operand_is_quantized_is_a_trait(name: str, weight: str) -> None:
    assert dict(shape_of(_call(name)).traits)["weight"] == weight


def test_one_row_is_another_kind_of_call_than_two() -> None:
    one, two, three = (shape_of(_traced("linear", {"x": F(rows, 8), "weight": F(8, 4)}, {})) for rows in (1, 2, 3))
    assert one.distance(two) == float("inf")
    assert two.distance(three) < 1


def test_leading_axes_are_rows() -> None:
    flat, nested = (_traced("linear", {"x": F(*x), "weight": F(8, 4)}, {}) for x in ((6, 8), (2, 3, 8)))
    assert shape_of(flat) == shape_of(nested)
    inner = _traced("norm", {"x": F(3, 8, 5)}, {"axis": 1})
    assert dict(shape_of(inner).sizes) == {"rows": 15, "features": 8}
    assert shape_of(inner).traits != shape_of(_traced("norm", {"x": F(15, 8)}, {})).traits


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        (0, 0),
        (1, 1),
        (15, 15),
        (16, 16),
        (17, 16),
        (64, 64),
        (80, 80),
        (96, 96),
        (8192, 8192),
        (8193, 8192),
        (50257, 49152),
    ],
)
def test_neighbours_share_a_bucket(size: int, bucket: int) -> None:
    assert bucket_of(size) == bucket


def test_the_direction_is_no_part_of_the_sizes() -> None:
    call = _call("linear")
    backward = shape_of(replace(call, direction="backward"))
    assert (backward.sizes, backward.traits) == (shape_of(call).sizes, shape_of(call).traits)
    assert backward.flops > shape_of(call).flops
    assert jnp.dtype("float32").name in dict(backward.traits)["x"]
