"""Flax models: quantized without being touched, whatever they are made of."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant.errors import QuantError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.qarray import dequantize
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


class Transformed(nnx.Module):
    """Whose methods use Flax's transformations, which hand on all variables."""

    def __init__(self) -> None:
        self.proj = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def remat(self, x: Any) -> Any:
        return self._counted(x)

    @nnx.remat
    def _counted(self, x: Any) -> Any:
        self.calls[...] = self.calls[...] + 1
        return jnp.tanh(self.proj(x))

    def jit(self, x: Any) -> Any:
        return nnx.jit(lambda layer, x: jnp.tanh(layer(x)))(self.proj, x)

    @property
    def total(self) -> Any:
        return jnp.sum(self.proj.kernel[...])


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


@pytest.mark.parametrize("name", ["remat", "jit"])
def test_methods_may_use_transformations_of_flax(name: str) -> None:
    model = Transformed()
    method = getattr(Transformed, name)
    quantized = quantize_model(model, RULES, X, call=method)
    result = getattr(quantized, name)(X)
    assert 0 < error(result, method(model, X)) < 0.02
    assert quantized.calls[...] == (1 if name == "remat" else 0)


def test_submodules_and_properties_read_dequantized_parameters_and_all_pickles() -> None:
    model = Transformed()
    quantized = quantize_model(model, RULES, X, call=Transformed.remat)
    assert 0 < error(quantized.proj(X), model.proj(X)) < 0.02
    held: Any = quantized.proj.kernel.get_value()
    np.testing.assert_array_equal(quantized.total, jnp.sum(dequantize(held)))
    for other in (pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized)):
        np.testing.assert_array_equal(other.remat(X), quantized.remat(X))
        assert type(other) is type(quantized) and report(other).rows() == report(quantized).rows()


def test_a_quantized_module_splits_merges_and_maps(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    graph, state = nnx.split(quantized)
    again = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X)
    np.testing.assert_allclose(again, quantized(X), rtol=1e-5, atol=1e-6)


def test_a_quantized_model_is_quantized_again_by_other_rules(mlp: Mlp) -> None:
    quantized = quantize_model(mlp, RULES, X)
    again = quantize_model(quantized, Rule(path="up", weights="int4"), X)
    up, down = again.up.kernel.get_value(), again.down.kernel.get_value()
    assert up.type == "int4" and isinstance(down, jax.Array)
    np.testing.assert_array_equal(down, dequantize(quantized.down.kernel.get_value()))
    same = quantize_model(quantized, RULES, X)
    np.testing.assert_allclose(same(X), quantized(X), rtol=1e-5, atol=1e-6)
    with pytest.raises(QuantError, match="Mlp is not quantized"):
        report(mlp)


@pytest.mark.parametrize("method", ["qat", "qt"])
def test_a_model_that_was_trained_quantized_is_quantized_with_what_it_learned(mlp: Mlp, method: str) -> None:
    trained: Any = quantize_model(mlp, RULES, X, method=method)
    trained.up.kernel.set_value(trained.up.kernel[...] * 2)
    quantized = quantize_model(trained.with_key(jax.random.key(0)), RULES, X)
    assert type(quantized).__name__ == "QuantizedMlp" and report(quantized).method == "ptq"
    assert quantized.up.kernel.get_value().codes.dtype == jnp.int8
    paths = [keys for keys, _ in nnx.to_flat_state(nnx.state(quantized))]
    assert paths == [keys for keys, _ in nnx.to_flat_state(nnx.state(mlp))]
    assert error(quantized(X), trained(X)) < 0.01
    assert isinstance(trained.up.kernel.get_value(), jax.Array) and report(trained).method == method


def test_a_linen_module_is_refused_and_the_function_that_takes_it_named() -> None:
    with pytest.raises(QuantError, match=r"Dense .* quantize_function\(model\.apply, variables"):
        quantize_model(linen.Dense(4), RULES, X)


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
    quantized = quantize_function(net.apply, variables, RULES, (tokens,))
    shapes = {row.path: row.scale_shape for row in report(quantized).parameters}
    assert shapes["params/Embed_0/embedding"] == (12, 1)
    assert shapes["params/Dense_0/kernel"] == (1, 16)
    assert error(jax.jit(quantized.apply)(quantized.params, tokens), net.apply(variables, tokens)) < 0.02
