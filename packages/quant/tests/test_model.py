"""Whole models: quantized without being touched, whatever they are made of."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from stack_core.errors import ArgumentError
from stack_quant.errors import QuantError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.rules import Rule

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
        "test_model.py",
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


def test_a_callable_pytree_keeps_its_methods() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Net:
        kernel: Any
        scale: float = dataclasses.field(metadata={"static": True}, default=2.0)

        def __call__(self, x: Any) -> Any:
            return self.scaled(x @ self.kernel)

        def scaled(self, x: Any) -> Any:
            return x * self.scale

    net = Net(jax.random.normal(jax.random.key(1), (16, 8)))
    quantized = quantize_model(net, RULES, X)
    call = jax.jit(lambda model, x: model(x))
    assert 0 < error(call(quantized, X), net(X)) < 0.02
    np.testing.assert_allclose(quantized.scaled(X), 2 * X)
    with pytest.raises(AttributeError, match="no method 'missing'"):
        quantized.missing()  # pyrefly: ignore


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(QuantError, match=r"neither an nnx\.Module nor a callable pytree"):
        quantize_model({"kernel": X}, RULES, X)


def test_values_that_are_not_finite_are_named_by_path() -> None:
    with pytest.raises(ArgumentError, match=r"mlp/kernel holds 1 NaN"):
        params = {"mlp": {"kernel": jnp.ones((16, 4)).at[2, 1].set(jnp.nan)}}
        quantize_function(lambda p, x: x @ p["mlp"]["kernel"], params, RULES, (X,))


def test_shapes_are_enough() -> None:
    shape = jax.ShapeDtypeStruct((16, 8), "float32")
    fn = lambda p, x: x @ p["kernel"]
    _, params, found = quantize_function(fn, {"kernel": shape}, RULES, (jax.ShapeDtypeStruct((2, 16), "float32"),))
    assert params["kernel"].shape == (16, 8)
    assert found.bytes_after == 16 * 8 + 4 * 8


def test_half_precision_of_little_spread_survives() -> None:
    w = (0.01 * jax.random.normal(jax.random.key(2), (64, 32))).astype(jnp.float16)
    fn = lambda p, x: x @ p["kernel"]
    eye = jnp.eye(64, dtype=jnp.float16)
    quantized, params, _ = quantize_function(fn, {"kernel": w}, RULES, (eye,))
    assert error(quantized(params, eye).astype(jnp.float32), w.astype(jnp.float32)) <= 0.0075
