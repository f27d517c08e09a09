"""Flax models: quantized without being touched, whatever they are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant.errors import QuantError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.rules import Rule

pytest.importorskip("flax", reason="needs flax: install stack-quant[flax]")

from flax import linen, nnx

RULES = [Rule(path="kernel|embedding", weights="int8")]
X = jax.random.normal(jax.random.key(0), (4, 16))


def error(actual: Any, expected: Any) -> float:
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(this, x: Any) -> Any:  # noqa: N805 (the point: any name will do)
        this.calls[...] = this.calls[...] + 1
        return this.down(this.hidden(x))

    def hidden(myself, x: Any) -> Any:  # noqa: N805
        return jax.nn.relu(myself.up(x))

    def unused(self) -> Any:
        return self.up.kernel.shape


def both(model: Any, x: Any) -> Any:
    return model(x), model.hidden(x)


@pytest.fixture
def mlp() -> Mlp:
    return Mlp(nnx.Rngs(0))


def test_an_nnx_module_stays_one_with_the_same_paths(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    assert isinstance(quantized, Mlp) and quantized.unused() == (16, 32)
    assert type(quantized).__name__ == "QuantizedMlp"
    paths = [keys for keys, _ in nnx.to_flat_state(nnx.state(quantized))]
    assert paths == [keys for keys, _ in nnx.to_flat_state(nnx.state(mlp))]
    assert quantized.up.kernel.get_value().codes.dtype == jnp.int8
    assert isinstance(mlp.up.kernel.get_value(), jax.Array)


@pytest.mark.parametrize("float_first", [True, False])
def test_neither_changes_what_the_other_computes(mlp: Mlp, float_first: bool) -> None:
    call = nnx.jit(lambda model, x: model(x))
    quantized = quantize_model(mlp, RULES, X)
    expected = mlp.down(jax.nn.relu(mlp.up(X)))
    order = [mlp, quantized] if float_first else [quantized, mlp]
    results = {type(model): call(model, X) for model in (*order, *order)}
    np.testing.assert_array_equal(results[Mlp], nnx.jit(lambda model, x: model.down(jax.nn.relu(model.up(x))))(mlp, X))
    assert 0 < error(results[type(quantized)], expected) < 0.02
    np.testing.assert_allclose(mlp(X), expected, rtol=1e-5, atol=1e-6)


def test_two_methods_of_one_module_and_other_batch_sizes(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    assert error(quantized.hidden(X[:1]), mlp.hidden(X[:1])) < 0.02
    assert quantized(jnp.ones((7, 16))).shape == (7, 8)


def test_variables_that_a_method_assigns_are_assigned(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    quantized(X)
    quantized(X)
    assert quantized.calls[...] == 2


def test_assigning_to_a_quantized_parameter_is_an_error() -> None:
    class Forgetful(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.ones((16, 4)))

        def __call__(self, x: Any) -> Any:
            return x @ self.kernel[...]

        def forget(self) -> None:
            self.kernel[...] = jnp.zeros((16, 4))

    quantized = quantize_model(Forgetful(), RULES, X)
    with pytest.raises(QuantError, match="forget assigns to kernel, which is quantized"):
        quantized.forget()


def test_a_quantized_module_splits_merges_and_maps(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    graph, state = nnx.split(quantized)
    again = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X)
    np.testing.assert_allclose(again, quantized(X), rtol=1e-5, atol=1e-6)


def test_a_quantized_model_is_not_quantized_again(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    with pytest.raises(QuantError, match=r"up/kernel is quantized already|down/kernel is quantized already"):
        quantize_model(quantized, RULES, X)
    with pytest.raises(QuantError, match="Mlp is not quantized"):
        report(mlp)


def test_the_report_reads_and_lists(mlp: Mlp) -> None:
    found = report(quantize_model(mlp, [*RULES, Rule(path="bias")], X, call=both))
    text = str(found)
    for part in (
        "ptq: ",
        "Rule(path='bias')",
        "up/kernel",
        "scales [1, 32]",
        "rule 1 leaves it in float",
        "test_nnx_model.py",
    ):
        assert part in text
    assert found.bytes_after < found.bytes_before
    assert {row["kind"] for row in found.rows()} == {"rule", "parameter", "operation"}
    assert [row.calls for row in found.operations] == [2, 1]


def test_a_linen_module_is_a_function_of_its_variables() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            embed = linen.Embed(12, 16)
            return embed.attend(linen.Dense(16)(embed(tokens)))

    tokens = jnp.array([[1, 2, 3]])
    net = Net()
    variables = net.init(jax.random.key(0), tokens)
    apply, quantized, found = quantize_function(net.apply, variables, RULES, (tokens,))
    shapes = {row.path: row.scale_shape for row in found.parameters}
    assert shapes["params/Embed_0/embedding"] == (12, 1)
    assert shapes["params/Dense_0/kernel"] == (1, 16)
    assert error(jax.jit(apply)(quantized, tokens), net.apply(variables, tokens)) < 0.02
