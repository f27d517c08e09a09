"""Core's ops take quantized weights as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

from .conftest import computed, scales

BOTH = (Rule(path=".*", weights="int8", activations="int8"),)
ONE = (Rule(path=".*", weights="int8"),)


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape) / 4


X = normal(0, 5, 16)
LABELS = jnp.array([1, 0, 3, -100, 2])
SIZES = jnp.array([2, 3], jnp.int32)

CALLS = {
    "linear": (lambda p, x: ops.linear(x, p["w"], bias=p["b"]), {"w": normal(1, 16, 8), "b": normal(2, 8)}, (1, 8)),
    "linear, tied": (lambda p, x: ops.linear(x, p["w"].T), {"w": normal(1, 8, 16)}, (8, 1)),
    "linear, mapped": (
        lambda p, x: jax.vmap(ops.linear, in_axes=(None, 0))(x, p["w"]),
        {"w": normal(1, 3, 16, 8)},
        (3, 1, 8),
    ),
    "linear, mapped along the last axis": (
        lambda p, x: jax.vmap(ops.linear, in_axes=(None, 2))(x, p["w"]),
        {"w": normal(1, 16, 8, 3)},
        (1, 8, 3),
    ),
    "gated_linear_unit": (
        lambda p, x: ops.gated_linear_unit(x, p["w"], p["up"], activation="gelu"),
        {"w": normal(1, 16, 8), "up": normal(2, 16, 8)},
        (1, 8),
    ),
    "ragged_dot": (lambda p, x: ops.ragged_dot(x, p["w"], SIZES), {"w": normal(1, 2, 16, 8)}, (2, 1, 8)),
    "linear_cross_entropy": (
        lambda p, x: ops.linear_cross_entropy(x, p["w"], LABELS),
        {"w": normal(1, 16, 8)},
        (1, 8),
    ),
}


@pytest.mark.parametrize(
    ("call", "rules"),
    [
        *((call, BOTH) for call in CALLS),
        *(pytest.param(call, ONE, marks=() if "_" in call else pytest.mark.slow) for call in CALLS),
    ],
)
def test_weights_go_into_ops_quantized(call: str, rules: Any, check: Any) -> None:
    fn, params, scale = CALLS[call]
    report = check(fn, params, X, rules=rules, tol=1e-5 if rules == ONE else 0.03)
    assert scales(report)["w"] == scale
    rounded = call in ("ragged_dot", "linear_cross_entropy")
    assert computed(report) == ["dequantized" if rules == ONE else "rounded" if rounded else "quantized"]
    reason = "activations are rounded to the type, and multiplied as floats"
    assert [row.reason for row in report.operations] == [reason if rounded and rules == BOTH else ""]


def test_an_op_gets_the_quantized_array_and_no_floats() -> None:
    quantized = quantize_function(lambda w, x: ops.linear(x, w), normal(1, 16, 8), ONE, (X,))
    (call,) = ops.explain(quantized.apply, quantized.params, X)
    assert call.op == "linear"
    assert "int8[16, 8]" in call.arrays["weight"]


@pytest.mark.parametrize("rules", [ONE, BOTH])
def test_the_weights_of_experts_go_into_ragged_dot_as_codes(rules: Any) -> None:
    for fn in (lambda w, x: ops.ragged_dot(x, w, SIZES), lambda w, x: jax.lax.ragged_dot(x, w, SIZES)):
        quantized = quantize_function(fn, normal(1, 2, 16, 8), rules, (X,))
        (call,) = ops.explain(quantized.apply, quantized.params, X)
        assert (call.op, "int8[2, 16, 8]" in call.arrays["rhs"]) == ("ragged_dot", True)
        assert call.arrays["lhs"].startswith("float32[5, 16]")
        assert [row.operands for row in report(quantized).operations] == [
            ("float32" if rules == ONE else "int8", "int8")
        ]


def test_a_norms_scale_is_left_in_float_with_a_reason(check: Any) -> None:
    report = check(lambda p, x: ops.norm(x @ p["w"], p["scale"]), {"w": normal(1, 16, 8), "scale": jnp.ones(8)}, X)
    assert scales(report) == {"w": (1, 8), "scale": None}
    assert [row.reason for row in report.parameters] == ["no product and no lookup uses it, only norm", ""]


def test_attention_rounds_what_it_is_given(check: Any) -> None:
    q = normal(3, 1, 4, 2, 8)
    fn = lambda p, q: ops.attention(q, q * p, q, causal=True)
    rules = (Rule(op="attention", activations="fp8_e4m3"),)
    report = check(fn, jnp.ones(8), q, rules=rules, tol=0.1)
    (row,) = report.operations
    assert (row.op, row.operands, row.computed) == ("attention", ("fp8_e4m3",) * 3, "rounded")
    assert row.reason == "activations are rounded to the type, and multiplied as floats"
