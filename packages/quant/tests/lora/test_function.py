"""Adapters on functions of parameters, beside the same functions of merged parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.config import parse
from stack_core.abi.errors import StackError
from stack_quant import quantize_array, quantize_function
from stack_quant.errors import QuantError, RuleError
from stack_quant.lora.function import adapt_function
from stack_quant.lora.section import LoRAConfig
from stack_quant.spec import ArraySpec


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def moved(factors):
    """Factors that change what the function computes."""
    leaves, structure = jax.tree.flatten(factors)
    return jax.tree.unflatten(structure, [leaf + 0.3 * normal(n, *leaf.shape) for n, leaf in enumerate(leaves)])


def scanned(params, x):
    def layer(x, kernel):
        return jnp.tanh(x @ kernel["in"]) @ kernel["out"], None

    return jax.lax.scan(jax.checkpoint(layer), x, params)[0]


def codes():
    """A matrix that is quantized already, such as one of a frozen companion."""
    return quantize_array(normal(9, 8, 6), ArraySpec())


SIZES = jnp.asarray([2, 0, 3])

CASES = {
    "product": (lambda params, x: x @ params["w"], {"w": (8, 6)}),
    "transposed": (lambda params, x: x @ params["w"].T, {"w": (6, 8)}),
    "on the left": (lambda params, x: jnp.einsum("oi,ni->on", params["w"], x), {"w": (6, 8)}),
    "heads": (lambda params, x: jnp.einsum("ni,ihd->nhd", x, params["w"]), {"w": (8, 3, 2)}),
    "reshaped": (lambda params, x: x @ params["w"].reshape(8, 6), {"w": (8, 3, 2)}),
    "batched": (lambda params, x: jnp.einsum("ni,gio->gno", x, params["w"]), {"w": (3, 8, 6)}),
    "mapped": (lambda params, x: jax.vmap(lambda w: ops.linear(x, w))(params["w"]), {"w": (3, 8, 6)}),
    "cast": (lambda params, x: (x @ params["w"].astype(jnp.float32)).astype(jnp.float32), {"w": (8, 6)}),
    "linear": (lambda params, x: ops.linear(x, params["w"], bias=jnp.ones(6)), {"w": (8, 6)}),
    "beside codes": (lambda params, x: ops.linear(x, params["w"]) + ops.linear(x, codes()), {"w": (8, 6)}),
    "gated": (lambda params, x: ops.gated_linear_unit(x, params["a"], params["b"]), {"a": (8, 6), "b": (8, 6)}),
    "ragged": (lambda params, x: ops.ragged_dot(x, params["w"], SIZES), {"w": (3, 8, 6)}),
    "concatenated": (lambda params, x: x @ jnp.concatenate([params["a"], params["b"]], 1), {"a": (8, 2), "b": (8, 4)}),
    "scan": (scanned, {"in": (2, 8, 5), "out": (2, 5, 8)}),
    "jitted": (lambda params, x: jax.jit(jnp.dot)(x, params["w"]), {"w": (8, 6)}),
    "own derivative": (lambda params, x: x @ params["w"] + jax.nn.relu(params["w"]).sum(0), {"w": (8, 6)}),
    "branch": (lambda params, x: jax.lax.cond(x[0, 0] > 9, jnp.sin, lambda x: x @ params["w"], x), {"w": (8, 8)}),
}


SIMILAR = ("on the left", "reshaped", "cast", "mapped")  # to "transposed", "heads", "product" and "batched"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(pytest.param(name, {}, marks=pytest.mark.slow if name in SIMILAR else ()) for name in CASES),
        ("product", {"rank_stabilized": True}),
        *((name, {"magnitude": True}) for name in ("heads", "ragged")),
        *(pytest.param(name, {"magnitude": True}, marks=pytest.mark.slow) for name in ("gated", "scan")),
    ],
)
def test_values_and_gradients_are_those_of_the_merged_parameters(name, rule):
    function, shapes = CASES[name]
    params = {key: normal(seed, *shape) for seed, (key, shape) in enumerate(shapes.items())}
    x = normal(9, 5, 8)
    rule = {"path": ".*", "rank": 2, **rule}
    adapted, factors = adapt_function(function, params, rule, [x], key=jax.random.key(0))
    unchanged = jax.jit(function)(params, x)
    np.testing.assert_allclose(jax.jit(adapted)(factors, params, x), unchanged, atol=1e-6)
    factors = moved(factors)
    assert set(factors) == set(params)

    def loss(factors, merged):
        results = function(adapted.merged(factors, params), x) if merged else adapted(factors, params, x)
        return jnp.sum(jnp.sin(results))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    ours, theirs = step(factors, False), step(factors, True)
    assert abs(ours[0] - jnp.sum(jnp.sin(unchanged))) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


@pytest.mark.parametrize("name", ["product", "gated", "ragged", "scan"])
def test_products_never_form_the_sum(name):
    function, shapes = CASES[name]
    params = {key: normal(seed, *shape) for seed, (key, shape) in enumerate(shapes.items())}
    x = normal(9, 5, 8)
    adapted, factors = adapt_function(function, params, {"path": ".*", "rank": 2}, [x], key=jax.random.key(0))
    program = str(jax.make_jaxpr(adapted)(factors, params, x))
    widths = {"product": "8,6", "gated": "8,6", "ragged": "3,8,6", "scan": "8,5"}
    assert f"f32[{widths[name]}] = add" not in program and f"f32[{widths[name]}] = mul" not in program


def test_adapters_go_onto_quantized_parameters():
    params, x = {"w": normal(0, 64, 6)}, normal(9, 5, 64)
    rule = {"path": "w", "weights": "nf4", "tile_size": 64}
    function = quantize_function(lambda params, x: x @ params["w"], params, rule, [x])
    adapted, factors = adapt_function(function, function.params, {"path": "w", "rank": 2}, [x], key=jax.random.key(0))
    np.testing.assert_allclose(adapted(factors, function.params, x), function(x), atol=1e-6)
    factors = moved(factors)
    expected = function(x) + 8.0 * (x @ factors["w"]["down"]) @ factors["w"]["up"]
    np.testing.assert_allclose(adapted(factors, function.params, x), expected, atol=1e-5)


def test_an_embedding_is_looked_up_with_its_adapter_merged():
    def tied(params, tokens):
        return jnp.take(params["table"], tokens, axis=0) @ params["table"].T

    params, tokens = {"table": normal(0, 7, 4)}, jnp.asarray([1, 6])
    adapted, factors = adapt_function(tied, params, {"path": "table", "rank": 2}, [tokens], key=jax.random.key(0))
    factors = moved(factors)
    np.testing.assert_allclose(
        adapted(factors, params, tokens), tied(adapted.merged(factors, params), tokens), atol=1e-5
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"path": "v"}], "path='v', matches no parameter in a product"),
        ([{"path": "w"}, {"path": "w|b"}], "Rule 1 of lora"),
        ([], "neither an adapter rule nor a list"),
        ([{"path": "("}], "not a regular expression"),
        ([{"path": "w", "rank": 0}], "nothing would be trained: all that match have rank 0"),
    ],
)
def test_rules_that_match_nothing_are_refused(rules, message):
    params, x = {"w": normal(0, 8, 6), "b": jnp.zeros(6)}, normal(9, 5, 8)
    with pytest.raises(RuleError, match=message.replace("(", r"\(")):
        adapt_function(lambda params, x: x @ params["w"] + params["b"], params, rules, [x], key=jax.random.key(0))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"path": "w"}, {"path": "b", "ranc": 2}], r"^Unknown key 'lora\.rules\.1\.ranc'\. Did you mean 'rank'"),
        ({"path": "w", "rank": "2"}, r"^lora\.rules\.0\.rank: .*integer"),
        ([{"path": "("}], r"^lora\.rules\.0\.path='\(' is not a regular expression"),
        ([], r"^lora\.rules is \[\], neither"),
    ],
)
def test_mistakes_in_the_section_have_the_path_of_the_rule(rules, message):
    with pytest.raises(StackError, match=message):
        parse(LoRAConfig, {"rules": rules}, path="lora")


def test_a_rule_of_rank_0_leaves_what_it_matches():
    params, x = {"a": normal(0, 8, 8), "b": normal(1, 8, 8)}, normal(9, 5, 8)
    rules = [{"path": "a", "rank": 0}, {"path": ".*", "rank": 3}]
    _, factors = adapt_function(lambda p, x: x @ p["a"] @ p["b"], params, rules, [x], key=jax.random.key(0))
    assert {path: found["down"].shape for path, found in factors.items()} == {"b": (8, 3)}


def test_adapters_on_adapters_are_refused():
    params, x = {"w": normal(0, 8, 6)}, normal(9, 5, 8)
    adapted, _ = adapt_function(lambda p, x: x @ p["w"], params, {"path": "w"}, [x], key=jax.random.key(0))
    with pytest.raises(QuantError, match="has adapters already"):
        adapt_function(adapted.function, params, {"path": "w"}, [x], key=jax.random.key(0))
