"""Calls, loops and branches hand quantized parameters on to what is inside of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

from .conftest import computed, scales

RULES = [Rule(path=".*", weights="int8")]


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape) / 4


X = normal(0, 4, 16)
W = normal(1, 16, 16)
STACK = normal(2, 3, 16, 16)


def times(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


jitted = jax.jit(times)


@jax.custom_vjp
def with_vjp(x: Any, w: Any) -> Any:
    return times(x, w)


with_vjp.defvjp(lambda x, w: (with_vjp(x, w), (x, w)), lambda saved, cotangent: (cotangent, saved[1]))


@jax.custom_jvp
def with_jvp(x: Any, w: Any) -> Any:
    return times(x, w)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


def in_while(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, times(carry[1], w)), (0, x))[1]


def carried_by_while(x: Any, w: Any) -> Any:
    def body(carry: Any) -> Any:
        count, x, w = carry
        return count + 1, times(x, w), w

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, w))[1]


def in_cond(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, times, lambda x, w: x @ w.T, x, w)


def in_fori(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: times(x, w), x)


def in_scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda x, _: (times(x, w), None), x, length=2)[0]


def carried_by_scan(x: Any, w: Any) -> Any:
    (x, _), _ = lax.scan(lambda carry, _: ((times(carry[0], carry[1]), carry[1]), None), (x, w), length=2)
    return x


def in_shard_map(x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((1, 1), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    specs = (PartitionSpec("rows"), PartitionSpec(None, "columns"))
    return jax.shard_map(times, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("rows", "columns"))(x, w)


INSIDE = {
    "jit": jitted,
    "jit in jit": jax.jit(lambda x, w: jitted(x, w) + 1),
    "a transpose in jit": lambda x, w: times(x, jax.jit(jnp.transpose)(w)),
    "remat": jax.checkpoint(times),
    "remat with a policy": jax.checkpoint(times, policy=jax.checkpoint_policies.dots_saveable),
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
    "while": in_while,
    "carried by while": carried_by_while,
    "fori_loop": in_fori,
    "cond": in_cond,
    "carried by scan": carried_by_scan,
    "shard_map": in_shard_map,
    "vmap": jax.vmap(times, in_axes=(0, None)),
    "vmap of scan": jax.vmap(in_scan, in_axes=(0, None)),
}


WITHOUT_ACTIVATIONS = ("jit", "remat", "carried by while", "cond", "vmap of scan")


@pytest.mark.parametrize(
    ("where", "activations"),
    [
        pytest.param(where, activations, marks=() if chosen else pytest.mark.slow)
        for where in INSIDE
        for activations, chosen in (
            ("int8", where not in WITHOUT_ACTIVATIONS),
            (None, where in WITHOUT_ACTIVATIONS),
        )
    ],
)
def test_a_parameter_is_quantized_wherever_it_is_used(where: str, activations: Any, check: Any) -> None:
    rules = [Rule(path="w", weights="int8", activations=activations)]
    tol = 1e-5 if activations is None else 0.03
    report = check(lambda p, x: INSIDE[where](x, p["w"]), {"w": W}, X, rules=rules, tol=tol)
    assert report.parameters[0].scale_shape is not None
    assert {row.reason for row in report.operations} == {""}
    assert set(computed(report)) == {"dequantized" if activations is None else "quantized"}


def layers(stack: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (times(x, w), None), x, stack)[0]


def test_layers_of_a_scan_have_scales_of_their_own(check: Any) -> None:
    report = check(layers, STACK, X)
    assert scales(report) == {"": (3, 1, 16)}


def test_tiles_of_stacked_layers(check: Any) -> None:
    report = check(layers, STACK, X, rules=[Rule(path=".*", weights="int4", tile_size=4)])
    assert scales(report) == {"": (3, 4, 16)}


def test_stacked_layers_in_reverse_with_remat(check: Any) -> None:
    def fn(stack: Any, x: Any) -> Any:
        step = jax.checkpoint(lambda x, w: (times(x, w), jnp.sum(x)))
        return lax.scan(step, x, stack, reverse=True, unroll=2)[0]

    check(fn, STACK, X)


def test_parameters_that_loops_and_branches_hand_on_stay_quantized(check: Any) -> None:
    def fn(params: Any, x: Any) -> Any:
        x, rows = lax.scan(lambda x, w: (times(x, w), (jnp.sum(x), w)), x, params["stack"], reverse=True)
        w = lax.cond(x[0, 0] > 0, lambda w, x: (w, x), lambda w, x: (w, -x), params["w"], x)[0]
        return x @ rows[1][2] @ w

    report = check(fn, {"stack": STACK, "w": W}, X)
    assert [(row.paths, row.reason) for row in report.operations] == [(("stack",), "")] * 2 + [(("w",), "")]


def test_a_parameter_that_a_branch_returns_is_reported(check: Any) -> None:
    def fn(params: Any, x: Any) -> Any:
        w = lax.cond(x[0, 0] > 0, lambda a, b: a, lambda a, b: b, params["a"], params["b"])
        return x @ w + x @ params["a"] + x @ params["b"]

    report = check(fn, {"a": W, "b": W.T}, X)
    reasons = [row.reason for row in report.operations if row.op.endswith("cond")]
    assert reasons == ["the parameter itself passes through a cond"] * 2


def test_a_function_with_a_derivative_of_its_own_keeps_it_where_nothing_inside_is_quantized() -> None:
    @jax.custom_vjp
    def scaled(x: Any, w: Any) -> Any:
        return x @ w

    scaled.defvjp(lambda x, w: (x @ w, None), lambda _, cotangent: (jnp.full_like(X, 7.0), jnp.zeros_like(W)))
    fn = lambda p, x: scaled(x, p["own"]) @ p["w"]
    rules = [Rule(path="w", weights="int8")]
    quantized = quantize_function(fn, {"own": W, "w": W}, rules, (X,))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(quantized(x)))(X), 7.0)


@pytest.mark.covering
@pytest.mark.parametrize("method", ["ptq", "qat", "qt"])
@pytest.mark.parametrize("transformed", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_a_derivative_of_its_own_stays_where_what_is_inside_is_quantized(method: str, transformed: Any) -> None:
    @jax.custom_vjp
    def total(x: Any, w: Any) -> Any:
        return jnp.sum(x @ w)

    total.defvjp(lambda x, w: (total(x, w), (x, w)), lambda saved, _: (saved[0] * 0.25, jnp.full_like(saved[1], 7.0)))
    rules = [Rule(path="w", weights="int8", activations="int8")]
    quantized = quantize_function(lambda p, x: total(x, p["w"]), {"w": W}, rules, (X,), method=method)
    result, to_x = transformed(jax.value_and_grad(quantized.apply, argnums=1))(quantized.params, X)
    assert set(computed(report(quantized))) != {"float"} and result != total(X, W)
    np.testing.assert_allclose(to_x, X / 4, rtol=1e-6)
    if method != "ptq":
        np.testing.assert_allclose(transformed(jax.grad(quantized.apply))(quantized.params, X)["w"], 7.0)


def test_vmap_around_a_quantized_function() -> None:
    quantized = quantize_function(lambda w, x: x @ w, W, RULES, (X,))
    batch = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(
        jax.vmap(quantized.apply, in_axes=(None, 0))(quantized.params, batch)[1], quantized(2 * X), 1e-5
    )
