"""Quantized operands of a class that core has never heard of."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import QView
from stack_core.ops import building
from stack_core.ops.definitions.gated_linear_unit import REFERENCE as GATED_LINEAR_UNIT
from stack_core.ops.definitions.linear import REFERENCE as LINEAR
from stack_core.ops.definitions.linear_cross_entropy import REFERENCE as LINEAR_CROSS_ENTROPY


@jax.tree_util.register_pytree_node_class
class Foreign:
    """Defines `__stack_qview__` and what a pytree needs; stores its parts in an order and under names of its own."""

    def __init__(self, step: Any, codes: Any, middle: Any) -> None:
        self.step, self.codes, self.middle = step, codes, middle

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.codes, self.step, self.middle, "foreign")

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.step, self.codes, self.middle), None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: Any) -> "Foreign":
        return cls(*parts)


D_IN, D_OUT = 12, 10
SCALES = {
    "tensor": (1, 1),
    "channel": (1, D_OUT),
    "row": (D_IN, 1),
    "tile": (3, 5),
    "row_tile": (4, D_OUT),
}


def _weight(seed: int = 0, scales: tuple[int, int] = (3, 5), dtype: Any = "int8", *, zeros: bool = True) -> Foreign:
    rng = np.random.default_rng(seed)
    codes = jnp.asarray(rng.integers(-8, 8, size=(D_IN, D_OUT)), dtype)
    middle = jnp.asarray(rng.integers(-4, 5, size=scales), "int8") if zeros else None
    return Foreign(jnp.asarray(rng.uniform(0.1, 0.2, size=scales), jnp.float32), codes, middle)


def _dense(weight: Foreign) -> Any:
    """What the weight stands for, written another way than core's."""

    def spread(part: Any) -> Any:
        tiles = np.array(weight.codes.shape) // np.array(part.shape)
        return jnp.kron(part.astype(jnp.float32), jnp.ones(tiles))

    codes = weight.codes.astype(jnp.float32) - (0.0 if weight.middle is None else spread(weight.middle))
    return codes * spread(weight.step)


X = jax.random.normal(jax.random.key(0), (6, D_IN))
LABELS = jnp.arange(6)
OPS = {
    "linear": (lambda weight, **named: ops.linear(X, weight, **named), LINEAR),
    "gated_linear_unit": (lambda weight, **named: ops.gated_linear_unit(X, weight, weight, **named), GATED_LINEAR_UNIT),
    "linear_cross_entropy": (
        lambda weight, **named: ops.linear_cross_entropy(X, weight, LABELS, reduction="none", **named),
        LINEAR_CROSS_ENTROPY,
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
def test_it_is_the_op_of_the_dequantized_weight(scales: tuple[int, int], dtype: str) -> None:
    weight = _weight(0, scales, dtype)
    np.testing.assert_allclose(ops.linear(X, weight), X @ _dense(weight), atol=2e-5)


def test_x_may_be_quantized_too() -> None:
    x, weight = _weight(1, (6, 5)), _weight(2, (5, 2))
    x = Foreign(x.step[:6, :2], x.codes[:6, :10], None)
    weight = Foreign(weight.step, weight.codes.T[:10], None)
    expected = _dense(x) @ _dense(weight)
    product = ops.linear(x, weight)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, expected, atol=2e-5)
    assert ops.linear(x, weight, preferred_dtype="bfloat16").dtype == jnp.bfloat16
    mixed = ops.linear(x, _dense(weight).astype("float16"))
    assert mixed.dtype == jnp.float16
    np.testing.assert_allclose(mixed.astype("float32"), expected, atol=0.02)


def test_a_codebook_holds_what_the_codes_stand_for() -> None:
    class Coded(Foreign):
        def __stack_qview__(self) -> QView:
            return dataclasses.replace(super().__stack_qview__(), codebook=jnp.asarray([-1.0, 0.25, 7.0, 0.5]))

    jax.tree_util.register_pytree_node_class(Coded)
    codes = np.arange(D_IN * D_OUT).reshape(D_IN, D_OUT) % 4
    weight = Coded(jnp.full((3, 5), 2.0), jnp.asarray(codes, "int4"), jnp.ones((3, 5)))
    expected = 2 * np.array([-2.0, -0.75, 6.0, -0.5])[codes]
    np.testing.assert_array_equal(ops.dequantize(weight, jnp.float32), expected)
    indices = jnp.asarray([3, 0])
    np.testing.assert_array_equal(building.take(weight, indices, 0, jnp.float32), expected[[3, 0]])


@pytest.mark.covering
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_it_is_the_same_under_jit_vmap_and_scan(op: str, dtype: str) -> None:
    call, _ = OPS[op]
    weights = [_weight(seed, dtype=dtype) for seed in range(3)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *weights)
    expected = [call(_dense(weight)) for weight in weights]
    np.testing.assert_allclose(jax.jit(call)(weights[0]), expected[0], atol=2e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(stacked), expected, atol=2e-5)
    scanned = jax.jit(lambda weights: jax.lax.scan(lambda carry, weight: (carry, call(weight)), (), weights)[1])
    np.testing.assert_allclose(scanned(stacked), expected, atol=2e-5)


@pytest.mark.parametrize("op", OPS)
def test_scales_have_a_gradient_and_integers_none(op: str) -> None:
    call, reference = OPS[op]
    implementation = dataclasses.replace(reference, name="other", backward=None)
    weight = _weight(zeros=True)

    def loss(call: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(call(weight)))

    gradient = jax.grad(functools.partial(loss, functools.partial(call, implementation=implementation)), allow_int=True)
    found = jax.jit(gradient)(weight)
    expected = jax.grad(lambda step: loss(call, _dense(Foreign(step, weight.codes, weight.middle))))(weight.step)
    np.testing.assert_allclose(found.step, expected, atol=2e-5)
    assert found.codes.dtype == jax.dtypes.float0 and found.middle.dtype == jax.dtypes.float0


def test_floating_values_are_codes_and_have_no_gradient() -> None:
    weight = _weight(dtype="float8_e4m3fn", zeros=False)
    gradient = jax.grad(lambda weight: jnp.sum(ops.linear(X, weight)))(weight)
    assert not np.any(gradient.codes.astype(jnp.float32)) and np.all(gradient.step != 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_result_has_the_dtype_of_x_whatever_that_of_the_scale(dtype: str) -> None:
    weight = _weight()
    weight = Foreign(weight.step.astype("bfloat16"), weight.codes, weight.middle)
    product = ops.linear(X.astype(dtype), weight)
    assert product.dtype == dtype
    np.testing.assert_allclose(product.astype("float32"), X @ _dense(weight), atol=0.1)


def test_a_pytree_that_holds_one_is_trained_by_its_other_leaves() -> None:
    def loss(parameters: Any) -> Any:
        return jnp.sum(jnp.square(ops.linear(X, parameters["frozen"]) @ parameters["adapter"]))

    parameters = {"frozen": _weight(), "adapter": jnp.ones((D_OUT, 2))}
    gradients = jax.jit(jax.grad(loss, allow_int=True))(parameters)
    assert np.all(np.isfinite(gradients["adapter"])) and np.any(gradients["adapter"])
    adapters = jax.jit(jax.grad(lambda adapter, rest: loss({**rest, "adapter": adapter})))
    np.testing.assert_allclose(adapters(parameters["adapter"], {"frozen": parameters["frozen"]}), gradients["adapter"])


def _product_dtypes(x: Any, weight: Any) -> set[str]:
    rest = {"bias": None, "preferred_dtype": jnp.float32, "requested": frozenset()}
    jaxpr = jax.make_jaxpr(lambda x, weight: LINEAR.forward(x=x, weight=weight, **rest))(x, weight)
    return {str(atom.aval.dtype) for eqn in _products(jaxpr) for atom in eqn.invars}


def _products(jaxpr: Any) -> list[Any]:
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    inner = [eqn.params["jaxpr"] for eqn in eqns if "jaxpr" in eqn.params]
    return [eqn for eqn in eqns if eqn.primitive.name == "dot_general"] + [
        eqn for body in inner for eqn in _products(body)
    ]


@pytest.mark.parametrize(
    ("x", "weight", "dtypes"),
    [
        (((3, 1), "int8", False), ((1, D_OUT), "int8", False), {"int8"}),
        (((1, 1), "int8", False), ((1, 5), "int4", False), {"int8"}),
        (((3, 1), "uint8", False), ((1, D_OUT), "int8", False), {"float32"}),
        (((3, 1), "int8", True), ((1, D_OUT), "int8", False), {"float32"}),
        (((3, 2), "int8", False), ((1, D_OUT), "int8", False), {"float32"}),
        (((3, 1), "int8", False), ((3, D_OUT), "int8", False), {"float32"}),
        (((3, 1), "float8_e4m3fn", False), ((1, D_OUT), "int8", False), {"float32"}),
    ],
)
def test_integers_are_multiplied_where_their_scales_are_of_rows_and_columns(x: Any, weight: Any, dtypes: Any) -> None:
    def made(seed: int, shape: tuple[int, ...], scales: Any, dtype: str, zeros: bool) -> Foreign:
        rng = np.random.default_rng(seed)
        codes = jnp.asarray(rng.integers(0, 7, size=shape)).astype(dtype)
        middle = jnp.ones(scales, "int8") if zeros else None
        return Foreign(jnp.asarray(rng.uniform(0.1, 0.2, size=scales), jnp.float32), codes, middle)

    left, right = made(0, (3, D_IN), *x), made(1, (D_IN, D_OUT), *weight)
    assert _product_dtypes(left, right) == dtypes
    expected = _dense(left) @ _dense(right)
    np.testing.assert_allclose(ops.linear(left, right, implementation="reference"), expected, rtol=1e-5)


def test_products_of_integers_are_exact_as_long_as_they_can_be() -> None:
    one = jnp.ones((1, 1), jnp.float32)
    for d_in, dtypes in ((2**16, {"int8"}), (2**17, {"float32"})):
        codes = jnp.full((2, d_in), -128, jnp.int8)
        left, right = Foreign(one, codes, None), Foreign(one, codes.T, None)
        assert _product_dtypes(left, right) == dtypes
    codes = jnp.full((1, 2**16), -128, jnp.int8)
    product = ops.linear(Foreign(one, codes, None), Foreign(one, codes.T, None), implementation="reference")
    assert float(product[0, 0]) == 2.0**30


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")])
def test_fp8_codes_are_multiplied_as_they_are(dtypes: tuple[str, str]) -> None:
    """Two types too, as of a gradient and a weight; the sum is float32, and the result has each row's own scale."""
    x, weight = _weight(1, (D_IN, 1), dtypes[0], zeros=False), _weight(0, (1, D_OUT), dtypes[1], zeros=False)
    square = Foreign(x.step, jnp.concatenate([x.codes, x.codes[:, :2]], axis=1), None)  # [D_IN, D_IN]
    call = functools.partial(ops.linear, implementation="reference")
    np.testing.assert_allclose(call(square, weight), _dense(square) @ _dense(weight), rtol=1e-6, atol=1e-6)
    text = jax.jit(call).lower(square, weight).as_text()
    names = "|".join(
        name.replace("float8_", "f8").replace("e4m3fn", "E4M3FN").replace("e5m2", "E5M2") for name in dtypes
    )
    assert re.search(rf"dot_general .*tensor<12x12x({names})>, tensor<12x10x({names})>\) -> tensor<12x10xf32>", text)
