"""Quantized training: products of codes in both directions, and what is kept between them."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core import ops
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig, Quantization

from .conftest import error, network

INT8 = Rule(path=".*", weights="int8", activations="int8", gradients="int8")
FP8 = Rule(path=".*", weights="fp8_e4m3", activations="fp8_e4m3", gradients="fp8_e5m2")


def trained(fn: Any, params: Any, *args: Any, rule: Rule = INT8) -> Any:
    return quantize_function(fn, params, [rule], args, method="qt")


def gradients(fn: Any, params: Any, *args: Any) -> Any:
    weights = jax.random.normal(jax.random.key(9), jax.eval_shape(fn, params, *args).shape)
    return jax.jit(jax.grad(lambda params: jnp.sum(fn(params, *args) * weights)))(params)


def both_gradients(fn: Any, weight: Any, x: Any) -> Any:
    shape = jax.eval_shape(fn, weight, x).shape
    cotangent = jax.random.normal(jax.random.key(9), shape)
    return jax.jit(jax.grad(lambda *operands: jnp.sum(fn(*operands) * cotangent), argnums=(0, 1)))(weight, x)


@pytest.mark.parametrize(("rule", "most", "key"), [(INT8, 0.15, jax.random.key(3)), (FP8, 0.5, None)])
def test_all_gradients_are_near_those_in_float(params: Any, args: Any, rule: Rule, most: float, key: Any) -> None:
    fn = trained(network, params, *args, rule=rule).with_key(key).apply
    found, expected = gradients(fn, params, *args), gradients(network, params, *args)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert 0 < error(got, wanted) < most


def of_groups(params: Any, x: Any) -> Any:
    return jnp.einsum("nk,gko->gno", x, params.reshape(2, 16, 24))


PRODUCTS = {
    "matmul": lambda params, x: x @ params[:16],
    "weight on the left": lambda params, x: params[:16].T @ x.T,
    "batched": of_groups,
    "linear": lambda params, x: ops.linear(x, params[:16], bias=params[20], preferred_dtype=jnp.float32),
    "mapped": lambda params, x: jax.vmap(ops.linear, in_axes=(None, 0))(x, params.reshape(2, 16, 24)),
    "gated": lambda params, x: ops.gated_linear_unit(x, params[:16], params[16:]),
    "ragged": lambda params, x: ops.ragged_dot(x, params.reshape(2, 16, 24), jnp.array([5, 9]), bias=params[:2] ** 2),
    "ragged primitive": lambda params, x: jax.lax.ragged_dot(x, params.reshape(2, 16, 24), jnp.array([5, 9])),
    "experts, mapped": lambda params, x: jax.vmap(ops.ragged_dot, in_axes=(0, None, None))(
        jnp.stack([x, 2 * x]), params.reshape(2, 16, 24), jnp.array([16, 0])
    ),
    "grouped convolution": lambda params, x: jax.lax.conv_general_dilated(
        x.reshape(8, 16, 2),
        params[:4].T.reshape(4, 6, 4).transpose(0, 2, 1)[:, :1],
        (2,),
        "SAME",
        (1,),
        (2,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    ),
}


@pytest.mark.parametrize("fn", PRODUCTS.values(), ids=PRODUCTS)
def test_each_product_has_both_gradients(fn: Any) -> None:
    weight, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (32, 24)), (1, (16, 16))))
    quantized = quantize_function(fn, weight, [INT8], (x,), method="qt")
    assert {row.computed for row in report(quantized).operations} <= {"quantized", "rounded"}
    run = quantized.with_key(jax.random.key(2)).apply
    assert 0 < error(run(weight, x), fn(weight, x)) <= 0.02
    for found, expected in zip(*(both_gradients(each, weight, x) for each in (run, fn)), strict=True):
        assert 0 < error(found, expected) <= 0.03


@pytest.mark.parametrize(("rule", "gradients"), [(INT8, "i8"), (FP8, "f8E5M2")], ids=["int8", "fp8"])
def test_experts_multiply_codes_in_all_three_products(rule: Rule, gradients: str) -> None:
    x, weight, sizes = jnp.ones((16, 8)), jnp.ones((2, 8, 24)), jnp.array([5, 9])
    fn = trained(lambda params, x: ops.ragged_dot(x, params, sizes), weight, x, rule=rule).apply
    step = jax.value_and_grad(lambda weight, x: jnp.sum(fn(weight, x)), argnums=(0, 1))
    products = re.findall(r"dot_general .*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", lowered(step, weight, x))
    operands = "i8" if rule is INT8 else "f8E4M3FN"
    assert sorted(products) == sorted([(operands, operands), (gradients, operands), (operands, gradients)])


def lowered(fn: Any, *args: Any) -> str:
    return jax.jit(fn).lower(*args).as_text()


def test_experts_with_integers_times_fp8_are_rounded_and_say_so() -> None:
    x, weight, sizes = jnp.ones((16, 8)), jnp.ones((2, 8, 24)), jnp.array([5, 9])
    rule = Rule(path=".*", weights="int8", activations="fp8_e4m3")
    quantized = trained(lambda params, x: ops.ragged_dot(x, params, sizes), weight, x, rule=rule)
    (row,) = report(quantized).operations
    assert (row.computed, row.reason) == ("rounded", "activations are rounded to the type, and multiplied as floats")
    assert "xf8E4M3FN>, " not in "".join(re.findall("dot_general .*", lowered(quantized.apply, weight, x)))


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, 1e6])
def test_rows_of_no_group_have_no_part_in_the_scales_of_the_others(garbage: float) -> None:
    x, weight = jax.random.normal(jax.random.key(0), (16, 8)), jax.random.normal(jax.random.key(1), (2, 8, 24))
    cotangent, inside = jax.random.normal(jax.random.key(2), (16, 24)), jnp.arange(16)[:, None] < 14
    fn = trained(lambda params, x: ops.ragged_dot(x, params, jnp.array([5, 9])), weight, x).apply

    def results(filler: float) -> Any:
        result, pull = jax.vjp(fn, weight, jnp.where(inside, x, filler))
        return result, pull(jnp.where(inside, cotangent, filler))

    jax.tree.map(np.testing.assert_array_equal, results(garbage), results(0.0))


def test_int8_convolution_of_activations_off_centre() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    images = 3 + jax.random.normal(keys[0], (8, 12, 12, 8))
    kernel = jax.random.normal(keys[1], (3, 3, 8, 16)) / 8

    def fn(params: Any, images: Any) -> Any:
        return jax.lax.conv_general_dilated(images, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    quantized = trained(fn, kernel, images)
    for key in (None, keys[2]):
        assert error(gradients(quantized.with_key(key).apply, kernel, images), gradients(fn, kernel, images)) <= 0.02


def test_rounding_at_random_is_unbiased_and_repeats_for_the_same_key() -> None:
    weight, x = jax.random.normal(jax.random.key(0), (16, 24)), jax.random.normal(jax.random.key(1), (32, 16))
    product = lambda params, x: x @ params
    fn = trained(product, weight, x)
    run = jax.jit(lambda key: gradients(fn.with_key(key).apply, weight, x))
    np.testing.assert_array_equal(run(jax.random.key(1)), run(jax.random.key(1)))
    drawn = jax.lax.map(run, jax.random.split(jax.random.key(0), 256))
    operands_alone = Rule(path=".*", weights="int8", activations="int8")
    expected = gradients(trained(product, weight, x, rule=operands_alone).apply, weight, x)
    one, to_nearest = error(drawn[0], expected), error(gradients(fn.apply, weight, x), expected)
    assert error(jnp.mean(drawn, axis=0), expected) < min(0.1 * one, 0.2 * to_nearest)


def test_products_draw_apart_in_loops_and_maps() -> None:
    x, weights = jnp.ones((3, 4, 8)), jnp.stack([jnp.eye(8)] * 3)

    def looped(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda _, pair: (None, pair[0] @ pair[1]), None, (x, params))[1]

    for fn in (looped, lambda params, x: x @ params, lambda params, x: jax.vmap(ops.linear)(x, params)):
        run = trained(fn, weights, x).with_key(jax.random.key(0))
        # Every product has the same operands and the same cotangent.
        cotangent = jnp.where(jnp.arange(8) == 0, 1.0, 0.3) * jnp.array([1.0, 0.7, 0.6, 0.3])[:, None]
        _, pull = jax.vjp(lambda params, run=run: run.apply(params, x), weights)
        (found,) = pull(jnp.broadcast_to(cotangent, (3, 4, 8)))
        assert not np.array_equal(found[0], found[1]) and not np.array_equal(found[1], found[2])


def test_what_is_kept_is_quantized() -> None:
    x, weights = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((4, 32, 32))

    def fn(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w.astype(x.dtype), None), x, params)[0]

    def kept(fn: Any) -> dict[str, int]:
        _, pull = jax.eval_shape(lambda params: jax.vjp(lambda params: fn(params, x), params), weights)
        sizes: dict[str, int] = {}
        for leaf in jax.tree.leaves(pull):
            sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
        return sizes

    assert kept(fn).get("bfloat16", 0) >= 4 * 64 * 32
    quantized = kept(trained(fn, weights, x).apply)
    assert quantized.get("bfloat16", 0) == 0 and quantized["int8"] == 4 * (64 * 32 + 32 * 32)
    assert quantized.get("float32", 0) <= 4 * 2 * 32


def test_no_gradient_of_the_data_is_computed() -> None:
    fn = trained(lambda params, x: jax.nn.relu(x @ params["a"]) @ params["b"], PAIR, jnp.ones((4, 8))).apply
    text = str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(fn(params, jnp.ones((4, 8))))))(PAIR))
    assert products_in(text) == 2 + 3


def products_in(program: str, primitive: str = "dot_general") -> int:
    """With those that stack-kernels, where it is installed, leaves to machine code."""
    return program.count(f"= {primitive}[") + program.count("= ffi_call[")


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("primitive", ["dot_general", "conv_general_dilated"])
def test_one_gradient_alone_costs_one_product_and_keeps_one_operand(primitive: str, wanted: int) -> None:
    operands = {"dot_general": ((16, 24), (8, 16)), "conv_general_dilated": ((3, 3, 4, 6), (2, 5, 5, 4))}[primitive]
    params, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(operands))

    def product(params: Any, x: Any) -> Any:
        if primitive == "dot_general":
            return x @ params
        return jax.lax.conv_general_dilated(x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    fn, given = trained(product, params, x).apply, (params, x)

    def of_wanted(array: Any) -> Any:
        return fn(*(array if place == wanted else one for place, one in enumerate(given)))

    text = str(jax.make_jaxpr(jax.grad(lambda array: jnp.sum(of_wanted(array))))(given[wanted]))
    assert products_in(text, primitive) == 2
    kept = jax.eval_shape(lambda array: jax.vjp(of_wanted, array)[1], given[wanted])
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.int8) == given[1 - wanted].size


PAIR = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 2))}


def test_what_has_no_quantized_gradient_is_left_in_float_and_says_so() -> None:
    def fn(params: Any, x: Any) -> Any:
        return ops.linear_cross_entropy(x @ params["up"], params["head"], jnp.arange(4))

    params = {"up": jnp.ones((8, 8)), "head": jnp.ones((8, 4))}
    quantized = quantize_function(fn, params, [INT8], (jnp.ones((4, 8)),), method="qt")
    assert [(row.computed, row.reason) for row in report(quantized).operations] == [
        ("quantized", ""),
        ("float", "it has no quantized gradient"),
    ]
    rules = [replace(INT8, path="head"), replace(INT8, path="up")]
    with pytest.raises(RuleError, match=r"Rule 0, .*: method 'qt' quantizes none of .*linear_cross_entropy: it has no"):
        quantize_function(fn, params, rules, (jnp.ones((4, 8)),), method="qt")


def test_a_module_draws_from_a_key_that_its_state_does_not_keep() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, 8))
    quantized = quantize_model(model, [INT8], x, method="qt")
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert [path for path, _ in nnx.to_flat_state(nnx.state(quantized))] == paths

    @nnx.jit
    def step(model: Any, key: Any) -> Any:
        return nnx.grad(lambda model: jnp.sum(jnp.sin(model.with_key(key)(x))))(model).kernel.get_value()

    first, again, other = (step(quantized, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_key_of_an_objective_is_that_of_the_rounding() -> None:
    recipe = QuantConfig(rules=(INT8,), method="qt")
    x = jax.random.normal(jax.random.key(0), (16, 8))
    transform = Quantization(recipe, {"inputs": x})
    model = transform.apply(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def objective(model: Any, x: Any, *, key: Any) -> Any:
        del key
        return jnp.sum(jnp.sin(model(x)))

    def gradient(seed: int) -> Any:
        key = jax.random.key(seed)
        return jax.grad(lambda state: transform.call(objective, nnx.merge(graph, state), x, key=key))(state)

    first, again, other = (gradient(seed).kernel.get_value() for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8", "tile_size": 32}, "Leave `tile_size` out"),
        ({"weights": "nvfp4"}, "does not support products of nvfp4"),
        ({"weights": "nf4"}, "does not support products of nf4"),
        ({"gradients": "int8"}, "operands stay in float"),
    ],
)
def test_what_it_does_not_do_is_refused(options: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        quantize_function(lambda p, x: x @ p, PAIR["a"], [Rule(path=".*", **options)], (jnp.ones((4, 8)),), method="qt")
