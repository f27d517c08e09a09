"""Transforms of the inputs of products: AWQ, SmoothQuant and Hadamard rotations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ArgumentError
from stack_quant import Rule, quantize_function, report
from stack_quant.errors import RuleError
from stack_quant.transformed import TransformedArray, hadamard

from .test_algorithms import D_IN, STREAM, error_of, experts, joined, linear, mapped, scanned, stacked, weight

INT4 = {"weights": "int4", "tile_size": 32}
INT8 = {"weights": "int8", "activations": "int8"}


def with_outliers(x: jax.Array) -> jax.Array:
    return x.at[:, 3].multiply(50).at[:, 17].multiply(30)


OUTLIERS = [(with_outliers(x),) for (x,) in STREAM]


def error_with_outliers(algorithm: str | None, types) -> float:
    rule, params = Rule(path="w", algorithm=algorithm, **types), {"w": weight()}
    quantized, x = quantize_function(linear, params, rule, OUTLIERS[0], stream=OUTLIERS), OUTLIERS[1][0]
    expected = linear(params, x)
    return float(jnp.linalg.norm(quantized(x) - expected) / jnp.linalg.norm(expected))


@pytest.mark.parametrize(
    ("algorithm", "types", "part"),
    [
        ("awq", INT4, 0.5),
        ("awq+gptq", INT4, 0.12),
        ("smoothquant", INT8, 0.4),
        ("hadamard", INT8, 0.5),
        ("smoothquant+hadamard+gptq", INT8, 0.2),
    ],
)
def test_a_transform_has_a_part_of_the_error_of_rounding_with_outliers(algorithm, types, part) -> None:
    assert error_with_outliers(algorithm, types) <= part * error_with_outliers(None, types)


def test_a_rotation_is_orthonormal_and_its_own_inverse() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 96, 2))
    rotated = hadamard(x, 1, 32)
    np.testing.assert_allclose(hadamard(rotated, 1, 32), x, atol=1e-5)
    expected = np.kron(np.eye(3), np.asarray(hadamard(jnp.eye(32), 0, 32))) @ np.asarray(x)
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("algorithm", ["awq", "smoothquant+hadamard"])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (scanned, {"w": (2, D_IN, D_IN)}),
        (stacked, {"a": (D_IN, D_IN), "b": (D_IN, D_IN)}),
        (joined, {"a": (D_IN, D_IN), "b": (D_IN, D_IN)}),
        (experts, {"w": (3, D_IN, D_IN)}),
        (mapped, {"w": (2, D_IN, D_IN)}),
    ],
)
def test_products_of_transformed_inputs_equal_products_with_the_dequantized_parameters(fn, shapes, algorithm) -> None:
    keys = jax.random.split(jax.random.key(1), len(shapes))
    params = {name: jax.random.normal(key, shape) / 10 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    held = quantize_function(fn, params, Rule(path=".*", algorithm=algorithm, **INT4), STREAM[0], stream=STREAM)
    assert all(isinstance(array, TransformedArray) for array in held.params.values())
    plain = {name: jnp.asarray(np.asarray(array)) for name, array in held.params.items()}
    np.testing.assert_allclose(held(STREAM[1][0]), fn(plain, STREAM[1][0]), rtol=1e-3, atol=1e-3)
    assert error_of(fn, params, Rule(path=".*", algorithm=algorithm, **INT4)) < 0.4


def gated(params, x):
    return ops.gated_linear_unit(x, params["gate"], params["up"])


@pytest.mark.parametrize(("algorithm", "kinds"), [("hadamard", ["gated_linear_unit"]), ("awq", ["linear", "linear"])])
def test_a_gated_unit_transforms_its_inputs_once_if_its_matrices_agree(algorithm, kinds) -> None:
    params = {"gate": weight() / 8, "up": weight()[::-1] / 8}
    held = quantize_function(gated, params, Rule(path=".*", algorithm=algorithm, **INT8), STREAM[0], stream=STREAM)
    assert [row.op for row in report(held).operations] == kinds
    assert {row.computed for row in report(held).operations} == {"quantized"}
    expected = gated(params, STREAM[1][0])
    assert jnp.linalg.norm(held(STREAM[1][0]) - expected) < 0.03 * jnp.linalg.norm(expected)


def test_lookups_of_a_tied_table_undo_its_transform() -> None:
    tokens = jnp.arange(16).reshape(2, 8)
    tied = lambda params, tokens: params["table"][tokens] @ params["table"].T
    params, rule = {"table": weight().T}, Rule(path="table", weights="int8", algorithm="smoothquant+hadamard")
    held = quantize_function(tied, params, rule, (tokens,), stream=[(tokens,)])
    assert report(held).parameters[0].scheme == "int8 scaled rotated by 64"
    expected = tied(params, tokens)
    assert jnp.linalg.norm(held(tokens) - expected) < 0.02 * jnp.linalg.norm(expected)


def test_planning_by_shapes_gives_the_form_of_the_quantized_parameters() -> None:
    rule, params = Rule(path="w", algorithm="awq+hadamard", **INT4), {"w": weight(2)}
    held = quantize_function(scanned, params, rule, STREAM[0], stream=STREAM)
    shapes = {"w": jax.ShapeDtypeStruct(params["w"].shape, jnp.float32)}
    planned = quantize_function(scanned, shapes, rule, STREAM[0])
    assert jax.tree.structure(planned.params) == jax.tree.structure(held.params)
    assert jax.tree.map(jnp.shape, planned.params) == jax.tree.map(jnp.shape, held.params)


def test_a_transform_that_cannot_act_is_refused() -> None:
    for text in ("gptq+hadamard", "awq+smoothquant", "hadamard+awq", "gptq+hqq", "awq+qep"):
        with pytest.raises(ArgumentError, match="in this order"):
            Rule(path="w", weights="int4", algorithm=text)
    with pytest.raises(RuleError, match="static ranges are measured on inputs without transform"):
        Rule(path="w", algorithm="smoothquant", static_ranges=True, **INT8)
    rule = Rule(path="w", weights="int4", algorithm="hadamard")
    with pytest.raises(RuleError, match="blocks of at least 16 inputs, a power of two that divides its 12 inputs"):
        quantize_function(linear, {"w": jnp.ones((12, 8))}, rule, (jnp.ones((2, 12)),))
    with pytest.raises(RuleError, match="'awq' of w needs batches of inputs"):
        quantize_function(linear, {"w": weight()}, Rule(path="w", weights="int4", algorithm="awq"), STREAM[0])
