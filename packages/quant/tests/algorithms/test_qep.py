"""QEP: weights corrected for the errors of the quantized layers before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant import Rule, dequantize, quantize_function
from stack_quant.errors import QuantError, RuleError

from .test_algorithms import D_IN, STREAM, error_of, experts, weight


def two_layers(params, x):
    return jnp.tanh(x @ params["first"] / 10) @ params["second"]


PARAMS = {"first": jax.random.normal(jax.random.key(3), (D_IN, D_IN)), "second": weight()}


def rules(algorithm: str, second: str = "int8") -> list[Rule]:
    return [
        Rule(path="first", weights="int2", tile_size=32, algorithm="gptq"),
        Rule(path="second", weights=second, algorithm=algorithm),
    ]


def test_qep_adds_the_least_squares_solution_of_the_error_before() -> None:
    alpha, damp = 0.5, 0.2
    held = quantize_function(two_layers, PARAMS, rules(f"qep,alpha={alpha},damp={damp}"), STREAM[0], stream=STREAM)
    w, first, rounded = (
        np.asarray(each, np.float64)
        for each in (PARAMS["second"], PARAMS["first"], dequantize(held.params["first"], "float32"))
    )
    rows = np.concatenate([np.asarray(x, np.float64) for (x,) in STREAM])
    x, z = np.tanh(rows @ first / 10), np.tanh(rows @ rounded / 10)
    moments = z.T @ z / len(z)
    moments += damp * np.mean(np.diag(moments)) * np.eye(D_IN)
    expected = w + alpha * np.linalg.solve(moments, z.T @ (x - z) / len(z) @ w)
    found, scale = dequantize(held.params["second"], "float32"), np.asarray(held.params["second"].scale)
    # Rounding changes a weight by half a step, and the correction by many.
    np.testing.assert_array_less(np.abs(found - expected), 0.51 * np.broadcast_to(scale, w.shape))
    assert np.abs(expected - w).max() > 5 * scale.max()


def test_qep_lowers_the_error_of_the_outputs() -> None:
    corrected, plain = (error_of(two_layers, PARAMS, rules(name, "int4")) for name in ("qep,alpha=1+gptq", "gptq"))
    assert corrected < 0.8 * plain


def test_without_alpha_or_earlier_errors_the_weight_stays() -> None:
    first_only = [Rule(path="second", weights="int4", algorithm=name) for name in ("qep,alpha=1+gptq", "gptq")]
    for pair in (first_only, [rules("qep,alpha=0+gptq", "int4"), rules("gptq", "int4")]):
        found = [quantize_function(two_layers, PARAMS, rule, STREAM[0], stream=STREAM) for rule in pair]
        corrected, plain = (held.params["second"].codes.astype(int) for held in found)
        np.testing.assert_array_equal(corrected, plain)


def test_qep_refuses_what_it_cannot_correct() -> None:
    with pytest.raises(RuleError, match=r"'qep' corrects none of w: .* no `ragged_dot`"):
        rule = Rule(path="w", weights="int4", algorithm="qep+gptq")
        quantize_function(experts, {"w": jnp.stack([weight()] * 3)}, rule, STREAM[0], stream=STREAM)
    constant = [(jnp.ones((128, D_IN)),)]
    with pytest.raises(QuantError, match="second: the second moments of the inputs have no inverse with damp=0"):
        quantize_function(two_layers, PARAMS, rules("qep,damp=0"), constant[0], stream=constant)


def test_a_tied_table_is_not_corrected() -> None:
    def tied(params, tokens):
        return jnp.tanh(params["table"][tokens] @ params["first"]) @ params["table"].T

    params = {"table": weight().T, "first": PARAMS["first"] / 30}
    tokens = (jnp.arange(64).reshape(2, 32),)
    codes = []
    for algorithm in ("qep,alpha=1+gptq", "gptq"):
        rules = [Rule(path=path, weights="int4", algorithm=algorithm) for path in ("first", "table")]
        codes.append(quantize_function(tied, params, rules, tokens, stream=[tokens]).params["table"].codes)
    np.testing.assert_array_equal(codes[0].astype(int), codes[1].astype(int))
