"""Parameters are followed through whatever moves their entries; what ends that is named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stack_quant.errors import RuleError
from stack_quant.lora.function import adapt_function
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

from .conftest import computed, scales

WEIGHTS = [jax.random.normal(jax.random.key(seed), (16, 16)) / 4 for seed in range(3)]
X = jax.random.normal(jax.random.key(9), (4, 16))
STACKS = {
    "stack": jnp.stack,
    "expanded": lambda layers: jnp.concatenate([layer[None] for layer in layers]),
    "mapped": lambda layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
    "jitted": jax.jit(jnp.stack),
}


def scanned(stack: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", STACKS)
def test_a_list_of_layers_that_is_stacked_is_quantized(name: str, kind: str, check: Any) -> None:
    rules = [Rule(path=".*", weights=kind, tile_size=8, weight_calibration="absmax")]
    found = check(lambda layers, x: scanned(STACKS[name](layers), x), WEIGHTS, X, rules=rules)
    assert scales(found) == dict.fromkeys("012", (2, 16)) and set(computed(found)) <= {"dequantized", "quantized"}
    assert found.operations[-1].paths == ("0", "1", "2")


def test_stacked_layers_of_other_rules_are_joined_as_floats(check: Any) -> None:
    rules = [Rule(path="0", weights="int8"), Rule(path=".*", weights="int4")]
    found = check(lambda layers, x: scanned(jnp.stack(layers), x), WEIGHTS, X, rules=rules)
    assert computed(found) == ["dequantized", "float"]
    assert [row.reason for row in found.operations] == [
        "the parameters that are stacked are not quantized alike",
        "an operand is the result of stack on 0 and 1 and 2",
    ]


def test_stacked_layers_have_static_ranges_and_adapters_of_their_own() -> None:
    fn = lambda layers, x: scanned(jnp.stack(layers), x)
    rule = Rule(path=".*", weights="int8", activations="int8", static_ranges=True)
    quantized = quantize_function(fn, WEIGHTS, rule, (X,), stream=[(X,)])
    assert {site: span.high.shape for site, span in quantized.ranges.items()} == {"0": (3, 1)}
    adapted, factors = adapt_function(
        quantized, quantized.params, {"path": ".*", "rank": 2}, (X,), key=jax.random.key(0)
    )
    assert set(factors) == {"0", "1", "2"}
    np.testing.assert_array_equal(adapted(factors, quantized.params, X), quantized(X))
    for place in factors:
        gradient = jax.grad(lambda factors: jnp.sum(adapted(factors, quantized.params, X)))(factors)[place]["up"]
        assert jnp.linalg.norm(gradient) > 0


MOVED = {
    "padded": lambda p, x: x @ jnp.pad(p, ((0, 0), (4, 2))),
    "padded along what is summed": lambda p, x: jnp.pad(x, ((0, 0), (0, 8))) @ jnp.pad(p, ((0, 8), (0, 0))),
    "barrier": lambda p, x: x @ lax.optimization_barrier((p, x))[0],
    "composite": lax.composite(lambda p, x: jnp.tanh(x @ p), "test.product"),
    "reversed": lambda p, x: x @ p[::-1],
    "a part of what is summed": lambda p, x: x[:, :6] @ p[:6],
    "a part, reshaped": lambda p, x: x[:, :12] @ p[:6, :4].reshape(12, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_entries_that_move_stay_quantized(name: str, check: Any) -> None:
    for rule in (Rule(path=".*", weights="int8", weight_calibration="minmax"), Rule(path=".*", weights="nf4")):
        found = check(MOVED[name], WEIGHTS[0], X, rules=[rule])
        assert set(computed(found)) == {"dequantized"} and len(found.operations) == 1
        assert found.operations[0].reason == "" and found.bytes_after < found.bytes_before


def test_tiles_are_padded_and_reversed_with_their_entries(check: Any) -> None:
    rules = [Rule(path=".*", weights="int8", tile_size=4)]
    for name in ("padded along what is summed", "reversed", "barrier"):
        assert scales(check(MOVED[name], WEIGHTS[0], X, rules=rules)) == {"": (4, 16)}


ENDS = {
    "cumsum": lambda p, x: x @ jnp.cumsum(p, axis=0),
    "select_n": lambda p, x: x @ jnp.where(x[0, 0] > 0, p, 0),
    "pad": lambda p, x: x @ jnp.pad(p, ((0, 0), (0, 2)), constant_values=1.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_rule_that_quantizes_nothing_is_refused_and_names_the_primitive(name: str) -> None:
    rule = Rule(path=".*", weights="int8")
    with pytest.raises(RuleError, match=rf"Rule 0, .*, quantizes none of the 1 parameters that it matches\. .*{name}"):
        quantize_function(ENDS[name], WEIGHTS[0], rule, (X,))
    optional = quantize_function(ENDS[name], WEIGHTS[0], Rule(path=".*", weights="int8", optional=True), (X,))
    (row,) = report(optional).parameters
    assert row.scheme == "float32" and name in row.reason


def test_what_an_operand_is_made_of_is_named() -> None:
    quantized = quantize_function(lambda p, x: x @ (p[0] + p[1]), WEIGHTS, Rule(path=".*", weights="int8"), (X,))
    reasons = [row.reason for row in report(quantized).operations]
    assert reasons[-1] == "the operand is the result of add on 0"
    assert [row.reason for row in report(quantized).parameters] == ["", "nothing uses it", "nothing uses it"]
