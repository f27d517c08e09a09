"""Embeddings: their rows are taken from codes, and a tied head multiplies with the same codes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant.model import quantize_function
from stack_quant.rules import Rule

from .conftest import computed, scales

TABLE = jax.random.normal(jax.random.key(0), (12, 8))
TOKENS = jnp.array([[0, 3, 11], [5, 5, 2]])

LOOKUPS = {
    "table[tokens]": (lambda table, tokens: table[tokens], (12, 1)),
    "take": (lambda table, tokens: jnp.take(table, tokens, axis=0), (12, 1)),
    "take, clipped": (lambda table, tokens: jnp.take(table, tokens, axis=0, mode="clip"), (12, 1)),
    "along the last axis": (lambda table, tokens: jnp.take(table, tokens % 8, axis=1), (1, 8)),
    "cast first": (lambda table, tokens: table.astype(jnp.bfloat16)[tokens], (12, 1)),
    "tied": (lambda table, tokens: jnp.tanh(table[tokens]) @ table.T, (12, 1)),
    "mapped": (lambda table, tokens: jax.vmap(lambda token: table[token])(tokens.reshape(-1)), (12, 1)),
    "mapped, by two": (lambda table, tokens: jax.vmap(jax.vmap(lambda token: table[token]))(tokens), (12, 1)),
    "mapped columns": (
        lambda table, tokens: jax.vmap(lambda token: jax.lax.dynamic_index_in_dim(table, token, 1))(tokens[0] % 8),
        (1, 8),
    ),
    "transposed first": (lambda table, tokens: table.T[:, tokens], (12, 1)),
}


@pytest.mark.parametrize("form", LOOKUPS)
def test_rows_are_taken_from_codes(form: str, check: Any) -> None:
    fn, scale = LOOKUPS[form]
    report = check(fn, TABLE, TOKENS)
    assert scales(report) == {"": scale}
    assert {row.reason for row in report.operations} == {""}


@pytest.mark.parametrize(
    "fn",
    [
        lambda table, tokens: jnp.take(table, tokens, axis=0, mode="fill"),
        lambda table, tokens: jax.vmap(lambda token: table[token])(tokens[0]),
    ],
    ids=["take", "mapped"],
)
def test_the_whole_table_is_never_dequantized(fn: Any) -> None:
    quantized = quantize_function(fn, TABLE, [Rule(path=".*", weights="int4")], (TOKENS,))
    text = str(jax.make_jaxpr(quantized.apply)(quantized.params, TOKENS))
    assert "i4[12,8]" in text and "f32[12,8]" not in text


def test_an_index_outside_of_the_table_gives_nan_as_before() -> None:
    tokens = jnp.array([-13, -1, 0, 12])
    fn = lambda table, tokens: jnp.take(table, tokens, axis=0, mode="fill")
    quantized = quantize_function(fn, TABLE, [Rule(path=".*", weights="int8")], (tokens,))
    np.testing.assert_array_equal(jnp.isnan(quantized(tokens)), jnp.isnan(fn(TABLE, tokens)))


def test_indices_of_few_bits_reach_into_a_table_of_more_rows() -> None:
    table, tokens = jnp.tile(TABLE, (25, 1)), jnp.array([0, 255, 7], jnp.uint8)
    fn = lambda table, tokens: jnp.take(table, tokens, axis=0)
    quantized = quantize_function(fn, table, [Rule(path=".*", weights="int8")], (tokens,))
    rows = np.asarray(quantized.params)[np.asarray(tokens)]
    np.testing.assert_array_equal(quantized(tokens), rows)
    np.testing.assert_array_equal(quantized.params[tokens], rows)


def test_what_is_taken_along_two_axes_is_dequantized_and_reported(check: Any) -> None:
    report = check(lambda table, tokens: table[tokens[0], tokens[1]], TABLE, TOKENS % 8)
    assert computed(report) in (["dequantized"], ["quantized"])
