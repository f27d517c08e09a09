"""Eager calls of quantized programs are compiled once, and functions that a program shares stay shared."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_quant.model import quantize_function, report
from stack_quant.qarray import dequantize
from stack_quant.quantization import State
from stack_quant.rules import Rule
from stack_quant.transform.compiled import Compiled

X = jax.random.normal(jax.random.key(0), (3, 8))
WEIGHTS = [jax.random.normal(jax.random.key(seed), (8, 8)) for seed in range(1, 13)]
RULES = (Rule(path=".*", weights="int8", activations="int8"),)


@jax.jit
def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def layers(weights: Any, x: Any) -> Any:
    for w in weights:
        x = layer(w, x)
    return x


def functions(fn: Any, *args: Any) -> int:
    """How many functions of the name of a layer the lowered program has."""
    return jax.jit(fn).lower(*args).as_text().count("func.func private @layer")


def test_calls_of_one_function_share_one_where_rules_treat_them_alike() -> None:
    assert functions(layers, WEIGHTS, X) == 1
    quantized = quantize_function(layers, WEIGHTS, RULES, (X,))
    assert functions(quantized.apply, quantized.params, X) == 1
    left_out = (Rule(path="[37]"), *RULES)
    quantized = quantize_function(layers, WEIGHTS, left_out, (X,))
    assert functions(quantized.apply, quantized.params, X) == 2
    floats = jax.jit(layers)([ops.dequantize(w, jnp.float32) for w in quantized.params], X)
    assert 0 < jnp.abs(quantized(X) - floats).max() < 0.1


def test_results_of_a_shared_function_are_the_parameters_of_each_call() -> None:
    @jax.jit
    def transposed(w: Any) -> Any:
        return w.T

    def fn(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ transposed(w))
        return x

    rules = (Rule(path="0", weights="int8"), Rule(path="1", weights="int8"), Rule(path=".*", weights="int4"))
    quantized = quantize_function(fn, WEIGHTS, rules, (X,))
    assert all(row.scale_shape is not None for row in report(quantized).parameters)
    expected = fn(list(map(dequantize, quantized.params)), X)
    np.testing.assert_allclose(quantized(X), expected, atol=1e-5)


def test_an_eager_call_is_traced_once_for_the_shapes_of_its_arguments() -> None:
    traced: list[tuple[int, ...]] = []

    def fn(weights: Any, x: Any, *, power: Any = None) -> Any:
        traced.append(x.shape)
        x = layers(weights, x)
        return {"y": x if power is None else x**power, "rows": x.shape[0], "name": "x"}

    quantized = quantize_function(fn, WEIGHTS, RULES, (X,))
    traced.clear()
    results = [quantized(x) for x in (X, X + 1, X[:2], X)]
    assert traced == [(3, 8), (2, 8)]
    assert [result["rows"] for result in results] == [3, 3, 2, 3] and results[0]["name"] == "x"
    np.testing.assert_array_equal(
        results[0]["y"], jax.jit(lambda p, x: quantized.apply(p, x)["y"])(quantized.params, X)
    )
    np.testing.assert_array_equal(results[0]["y"], results[3]["y"])
    traced.clear()
    squares = [quantized(X, power=power)["y"] for power in (2, 2, 3)]  # fn may branch on a number
    assert len(traced) == 3 and jnp.array_equal(squares[0], squares[1])
    traced.clear()
    pickle.loads(pickle.dumps(quantized.quantization)).call(fn, quantized.params, State({}), X)
    assert len(traced) == 1


def test_no_more_than_64_functions_are_kept() -> None:
    compiled, run = Compiled(), []

    def function(x: Any) -> Any:
        run.append(1)
        return x

    for identity in (*range(70), 69, 0):
        assert compiled(identity, function, X) is not None
    assert len(run) == 71
