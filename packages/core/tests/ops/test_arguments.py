"""What each op says when its arguments do not fit."""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError, StackError, UnknownName
from stack_core.abi.ops import QView
from stack_core.abi.plugins import registries
from stack_core.ops.building import parameters_of
from stack_core.testing import Quantized, op_checks
from stack_core.testing.op_contract import draw


@pytest.fixture(autouse=True)
def unchecked_annotations() -> Iterator[None]:
    """Lets the calls through to the ops' own checks, as for a user, who has no type checker on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _zeros(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.zeros(shape, dtype)


QUERY, KEY = _zeros(2, 5, 4, 8), _zeros(2, 7, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"key": _zeros(2, 7, 2, 6)}, ShapeError, ("'key_dim' is 6 in key, but 8 in query",)),
        ({"value": _zeros(2, 6, 2, 8)}, ShapeError, ("'kv_seq' is 6 in value, but 7 in key",)),
        ({"query": _zeros(2, 5, 32)}, ShapeError, ("query has shape (2, 5, 32)", "batch, q_seq, heads, key_dim")),
        ({"query": _zeros(2, 5, 3, 8)}, ShapeError, ("3 heads", "2 kv_heads")),
        ({"bias": _zeros(2, 4, 5, 6)}, ShapeError, ("'kv_seq' is 6 in bias",)),
        ({"kv_lengths": _zeros(3, dtype=jnp.int32)}, ShapeError, ("'batch' is 3 in kv_lengths",)),
        ({"query_offset": _zeros(3, dtype=jnp.int32)}, ShapeError, ("'batch' is 3 in query_offset",)),
        ({"query_offset": _zeros(2)}, ArgumentError, ("query_offset has dtype float32", "an integer dtype")),
        ({"kv_lengths": _zeros(2)}, ArgumentError, ("kv_lengths has dtype float32", "an integer dtype")),
        ({"sinks": _zeros(2)}, ShapeError, ("'heads' is 2 in sinks",)),
        ({"segment_ids": _zeros(2, 5, dtype=jnp.int32)}, ShapeError, ("pass the pair",)),
        ({"segment_ids": (_zeros(2, 5, dtype=jnp.int32),)}, ArgumentError, ("segment_ids has 1 arrays", "the pair")),
        ({"mask": _zeros(1, 1, 5, 7)}, ArgumentError, ("mask has dtype float32",)),
        ({"window": (-1, 0)}, ArgumentError, ("window is (-1, 0)",)),
        ({"softcap": 0.0}, ArgumentError, ("softcap is 0.0",)),
        ({"scale": jnp.float32(1.0)}, ArgumentError, ("scale is an array",)),
        ({"query": QUERY.astype(jnp.bfloat16)}, ArgumentError, ("query bfloat16, key float32", "cast")),
    ],
)
def test_attention(arguments: dict[str, Any], kind: type[StackError], parts: tuple[str, ...]) -> None:
    _expect(kind, parts, ops.attention, {"query": QUERY, "key": KEY, "value": KEY, **arguments})


TOKENS, GATES = _zeros(2, 5, 3, 8), _zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"key": _zeros(2, 5, 3, 6)}, ShapeError, ("'key_dim' is 6 in key, but 8 in query",)),
        ({"key": _zeros(2, 5, 1, 8)}, ShapeError, ("'heads' is 1 in key, but 3 in query",)),
        ({"value": _zeros(2, 4, 3, 8)}, ShapeError, ("'seq' is 4 in value, but 5 in query",)),
        ({"decay": _zeros(2, 3, 5)}, ShapeError, ("'seq' is 3 in decay",)),
        ({"beta": _zeros(2, 5, 3, 8)}, ShapeError, ("beta has shape (2, 5, 3, 8)", "[batch, seq, heads]")),
        ({"initial_state": _zeros(2, 3, 4, 8)}, ShapeError, ("'key_dim' is 4 in initial_state",)),
        ({"beta": _zeros(2, 5, 3, dtype=jnp.int32)}, ArgumentError, ("beta has dtype int32",)),
        ({"value": TOKENS.astype(jnp.bfloat16)}, ArgumentError, ("query float32", "value bfloat16", "cast")),
        (
            {"initial_state": _zeros(2, 3, 8, 8, dtype=jnp.bfloat16)},
            ArgumentError,
            ("initial_state has dtype bfloat16", "expected float32"),
        ),
    ],
)
def test_linear_attention(arguments: dict[str, Any], kind: type[StackError], parts: tuple[str, ...]) -> None:
    operands = {"query": TOKENS, "key": TOKENS, "value": TOKENS, "decay": GATES, "beta": GATES}
    _expect(kind, parts, ops.linear_attention, {**operands, **arguments})


RAGGED, POOL, PLACES = _zeros(5, 4, 8), _zeros(9, 2, 16, 8), _zeros(3, dtype=jnp.int32)
PAGED = {
    "query": RAGGED,
    "key_pages": POOL,
    "value_pages": POOL,
    "block_tables": _zeros(3, 2, dtype=jnp.int32),
    "kv_lengths": PLACES,
    "query_starts": _zeros(4, dtype=jnp.int32),
}


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"layout": "phds"}, UnknownName, ("unknown layout 'phds'", "or 'phsd'?", "phsd, pshd, hpsd, psh2d")),
        ({"layout": "pshd"}, ShapeError, ("4 heads", "16 kv_heads")),
        ({"key_pages": _zeros(9, 2, 16, 6)}, ShapeError, ("'head_dim' is 6 in key_pages, but 8 in query",)),
        ({"value_pages": _zeros(8, 2, 16, 8)}, ShapeError, ("'pages' is 8 in value_pages, but 9 in key_pages",)),
        ({"value_pages": None}, ArgumentError, ("value_dim is None and there are no value_pages", "head_dim=8")),
        ({"value_pages": None, "value_dim": 9}, ArgumentError, ("value_dim is 9", "head_dim=8")),
        ({"value_dim": 8}, ArgumentError, ("value_dim is 8 beside value_pages",)),
        (
            {"layout": "psh2d", "value_pages": None},
            ShapeError,
            ("key_pages has shape (9, 2, 16, 8)", "pages, slots, kv_heads, 2, head_dim"),
        ),
        (
            {"layout": "psh2d", "key_pages": _zeros(9, 16, 2, 2, 8)},
            ArgumentError,
            ("value_pages is given", "'psh2d' key_pages holds the values too"),
        ),
        (
            {"layout": "psh2d", "key_pages": _zeros(9, 16, 2, 3, 8), "value_pages": None},
            ShapeError,
            ("axis '2' is 3 in key_pages, but 2 in its layout",),
        ),
        ({"query": _zeros(5, 32)}, ShapeError, ("query has shape (5, 32)", "tokens, heads, head_dim")),
        ({"kv_lengths": PLACES[:2]}, ShapeError, ("'batch' is 2 in kv_lengths, but 3 in block_tables",)),
        ({"query_starts": PLACES}, ShapeError, ("query_starts has shape (3,); expected (4,)", "3 sequences")),
        ({"kv_lengths": _zeros(3)}, ArgumentError, ("kv_lengths has dtype float32", "integer")),
        ({"sinks": _zeros(2)}, ShapeError, ("'heads' is 2 in sinks",)),
        ({"window": (-1, 0)}, ArgumentError, ("paged_attention: window is (-1, 0)",)),
        ({"softcap": 0.0}, ArgumentError, ("softcap is 0.0",)),
        ({"query": RAGGED.astype(jnp.bfloat16)}, ArgumentError, ("query bfloat16, key_pages float32", "cast")),
    ],
)
def test_paged_attention(arguments: dict[str, Any], kind: type[StackError], parts: tuple[str, ...]) -> None:
    _expect(kind, parts, ops.paged_attention, {**PAGED, **arguments})


@pytest.mark.parametrize(
    ("op", "arguments", "kind", "parts"),
    [
        ("linear", {"x": _zeros(2, 3), "weight": _zeros(4, 5)}, ShapeError, ("'d_in' is 4 in weight, but 3 in x",)),
        ("linear", {"x": _zeros(2, 3, dtype=jnp.int8), "weight": _zeros(3, 5)}, ArgumentError, ("x has dtype int8",)),
        ("norm", {"x": _zeros(2, 3), "scale": _zeros(2)}, ShapeError, ("scale has shape (2,)", "axis -1")),
        ("norm", {"x": _zeros(2, 3), "residual": _zeros(3)}, ShapeError, ("residual has shape (3,)",)),
        ("norm", {"x": _zeros(2, 3), "axis": 2}, ShapeError, ("axis 2 is outside x",)),
        ("norm", {"x": _zeros(2, 3), "kind": "batch"}, UnknownName, ("unknown kind 'batch'", "rms, layer")),
        (
            "rope",
            {"x": _zeros(2, 3, 1, 4), "positions": _zeros(3, dtype=jnp.int32)},
            ShapeError,
            ("'...' is () in positions, but (2,) in x",),
        ),
        ("rope", {"x": _zeros(3, 1, 4), "positions": _zeros(3)}, ArgumentError, ("positions has dtype float32",)),
        (
            "rope",
            {"x": _zeros(3, 1, 4), "positions": _zeros(3, dtype=jnp.int32), "rotary_dim": 6},
            ArgumentError,
            ("rotary_dim is 6", "head_dim=4"),
        ),
        (
            "gated_linear_unit",
            {"x": _zeros(2, 3), "w_gate": _zeros(3, 4), "w_up": _zeros(3, 4), "activation": "sillu"},
            UnknownName,
            ("unknown activation 'sillu'", "Did you mean 'silu'"),
        ),
        (
            "gated_linear_unit",
            {"x": _zeros(2, 3), "w_gate": _zeros(3, 4), "w_up": _zeros(3, 4), "bias_up": _zeros(3)},
            ShapeError,
            ("'d_out' is 3 in bias_up, but 4 in w_gate",),
        ),
        (
            "gated_linear_unit",
            {"x": _zeros(2, 3), "w_gate": _zeros(3, 4), "w_up": _zeros(3, 4), "limit": 0.0},
            ArgumentError,
            ("limit is 0.0",),
        ),
        (
            "ragged_dot",
            {
                "lhs": _zeros(6, 3),
                "rhs": _zeros(2, 3, 5),
                "group_sizes": _zeros(2, dtype=jnp.int32),
                "bias": _zeros(5),
            },
            ShapeError,
            ("bias has shape (5,)", "[groups, d_out]"),
        ),
        (
            "linear_cross_entropy",
            {"hidden": _zeros(2, 3), "weight": _zeros(3, 5), "labels": _zeros(3, dtype=jnp.int32)},
            ShapeError,
            ("'...' is (3,) in labels",),
        ),
        (
            "linear_cross_entropy",
            {"hidden": _zeros(2, 3), "weight": _zeros(3, 5), "labels": _zeros(2, dtype=jnp.int32), "reduction": "avg"},
            UnknownName,
            ("mean, sum, none",),
        ),
        (
            "linear_cross_entropy",
            {
                "hidden": _zeros(2, 3),
                "weight": _zeros(3, 5),
                "labels": _zeros(2, dtype=jnp.int32),
                "label_smoothing": 2,
            },
            ArgumentError,
            ("label_smoothing is 2",),
        ),
        (
            "linear_cross_entropy",
            {
                "hidden": _zeros(2, 3),
                "weight": _zeros(3, 5),
                "labels": _zeros(2, dtype=jnp.int32),
                "bias": _zeros(3),
            },
            ShapeError,
            ("'vocab' is 3 in bias, but 5 in weight",),
        ),
        (
            "linear_cross_entropy",
            {"hidden": _zeros(2, 3), "weight": _zeros(3, 5), "labels": _zeros(2, dtype=jnp.int32), "softcap": -1.0},
            ArgumentError,
            ("softcap is -1.0",),
        ),
        (
            "ragged_dot",
            {"lhs": _zeros(6, 3), "rhs": _zeros(2, 4, 5), "group_sizes": _zeros(2, dtype=jnp.int32)},
            ShapeError,
            ("'d_in' is 4 in rhs, but 3 in lhs",),
        ),
        (
            "ragged_dot",
            {"lhs": _zeros(6, 3), "rhs": _zeros(2, 3, 5), "group_sizes": _zeros(3, dtype=jnp.int32)},
            ShapeError,
            ("'groups' is 3 in group_sizes, but 2 in rhs",),
        ),
        (
            "ragged_dot",
            {"lhs": _zeros(6, 3), "rhs": _zeros(0, 3, 5), "group_sizes": _zeros(0, dtype=jnp.int32)},
            ShapeError,
            ("'groups' is 0 in rhs", "at least one group"),
        ),
        (
            "ragged_dot",
            {"lhs": _zeros(6, 3), "rhs": _zeros(2, 3, 5), "group_sizes": _zeros(2)},
            ArgumentError,
            ("group_sizes has dtype float32",),
        ),
        (
            "ragged_dot",
            {"lhs": _zeros(6, 3), "rhs": _zeros(2, 3, 5, dtype=jnp.float16), "group_sizes": _zeros(2, dtype=jnp.int32)},
            ArgumentError,
            ("lhs float32, rhs float16", "cast"),
        ),
    ],
)
def test_other_ops(op: str, arguments: dict[str, Any], kind: type[StackError], parts: tuple[str, ...]) -> None:
    _expect(kind, parts, getattr(ops, op), arguments)


def test_a_scale_that_does_not_divide_its_weight() -> None:
    weight = Quantized(_zeros(4, 6, dtype=jnp.int8), _zeros(3, 6))
    _expect(ShapeError, ("Quantized", "(3, 6)", "(4, 6)"), ops.linear, {"x": _zeros(2, 4), "weight": weight})


@pytest.mark.parametrize(
    ("codes", "codebook", "kind", "parts"),
    [
        ("float8_e4m3fn", (4,), ArgumentError, ("float8_e4m3fn", "codebook", "integers")),
        ("int8", (4, 1), ShapeError, ("codebook", "(4, 1)", "[levels]")),
    ],
)
def test_a_codebook_that_does_not_fit(
    codes: str, codebook: tuple[int, ...], kind: type[StackError], parts: tuple[str, ...]
) -> None:
    weight = Quantized(_zeros(4, 6, dtype=codes), _zeros(1, 6), codebook=_zeros(*codebook))
    _expect(kind, parts, ops.linear, {"x": _zeros(2, 4), "weight": weight})


def test_a_view_of_another_abi() -> None:
    class Later(Quantized):
        def __stack_qview__(self) -> QView:
            return QView((2, 0), self.values, self.scales, None, "later")

    weight = Later(_zeros(4, 6, dtype=jnp.int8), _zeros(1, 6))
    _expect(ArgumentError, ("ABI 2.0", "reads ABI 1"), ops.linear, {"x": _zeros(2, 4), "weight": weight})


ON_ONE_DEVICE = sorted(set(registries.op_definitions.names()) - {"collective_matmul", "exchange", "ring_attention"})


@pytest.mark.parametrize("op", ON_ONE_DEVICE)
def test_no_argument_is_a_list_and_no_option_an_array(op: str) -> None:
    """`ops.norm([[1.0, 2.0]])` and an epsilon that JAX traces are refused by name, as is the like of any op."""
    checks = [check for check in op_checks(op) if check.aspect == "float32"]
    parameters = parameters_of(op)
    arrays: dict[str, Any] = {}
    calls = [(draw(check.case, "float32"), dict(check.case.options)) for check in checks]
    for given, options in calls:
        for name in set(given) - set(arrays):
            if isinstance(given[name], jax.Array):
                arrays[name] = given
                for value in (given[name].tolist(), 2.0):
                    with pytest.raises(ArgumentError, match=rf"{op}: {name}(\[0\])? is of type {type(value).__name__}"):
                        getattr(ops, op)(**{**given, name: value}, **options)
    given, options = calls[0]
    defaults = inspect.signature(getattr(ops, op)).parameters
    unlike_numbers = {"preferred_dtype", *(name for each, _ in calls for name in each)}
    static = [name for name in parameters if isinstance(defaults[name].default, float | int | None)]
    for name in (name for name in static if name not in unlike_numbers):

        @jax.jit
        def call(value: Any, name: str = name) -> Any:
            return getattr(ops, op)(**given, **{**options, name: value})

        with pytest.raises(ArgumentError, match=f"{op}: {name} is an array; expected a Python number"):
            call(1)


def _expect(kind: type[StackError], parts: tuple[str, ...], op: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        op(**arguments)
    for part in parts:
        assert part in str(caught.value)
