"""Products of every form, of a parameter and an activation or of two activations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import ShapeError
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

from .conftest import computed, scales

WEIGHTS = (Rule(path=".*", weights="int8"),)
BOTH = (Rule(path=".*", weights="int8", activations="int8"),)


def normal(seed: int, *shape: int, dtype: str = "float32") -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


X = normal(0, 2, 3, 32)

FORMS = {
    "x @ w": (lambda w, x: x @ w, (32, 16), (1, 16)),
    "w.T": (lambda w, x: x @ w.T, (16, 32), (16, 1)),
    "vector @ w": (lambda w, x: x[0, 0] @ w, (32, 16), (1, 16)),
    "w @ vector": (lambda w, x: w @ x[0, 0], (16, 32), (16, 1)),
    "w @ x": (lambda w, x: w @ x[0].T, (16, 32), (16, 1)),
    "heads": (lambda w, x: jnp.einsum("bsd,dhk->bshk", x, w), (32, 4, 8), (1, 4, 8)),
    "heads, h first": (lambda w, x: jnp.einsum("bsd,hdk->bhsk", x, w), (4, 32, 8), (4, 1, 8)),
    "two contracted": (lambda w, x: jnp.einsum("bshk,hkd->bsd", x.reshape(2, 3, 4, 8), w), (4, 8, 16), (1, 1, 16)),
    "batched": (lambda w, x: jnp.einsum("bsd,bdf->bsf", x, w), (2, 32, 16), (2, 1, 16)),
    "batched last": (lambda w, x: jnp.einsum("bsd,dfb->bsf", x, w), (32, 16, 2), (1, 16, 2)),
    "three terms": (lambda w, x: jnp.einsum("bsd,df,bs->bf", x, w, x[..., 0]), (32, 16), (1, 16)),
    "reshaped": (lambda w, x: x @ w.reshape(32, 16), (32, 4, 4), (1, 4, 4)),
    "split in heads": (lambda w, x: jnp.einsum("bsd,dhk->bshk", x, w.reshape(32, 4, 4)), (32, 16), (1, 16)),
    "contracted halves": (lambda w, x: x @ w.reshape(32, 16), (2, 16, 16), (1, 1, 16)),
    "part of an axis": (lambda w, x: jnp.einsum("bsd,hdk->bshk", x, w.reshape(2, 32, 4)), (64, 4), (2, 4)),
    "sliced": (lambda w, x: x @ w[:, 4:12], (32, 16), (1, 16)),
    "cut in three": (lambda w, x: sum(x @ part for part in jnp.split(w, 3, axis=1)), (32, 12), (1, 12)),
    "one of a stack": (lambda w, x: x @ w[1], (3, 32, 16), (3, 1, 16)),
    "a traced one of a stack": (lambda w, x: x @ lax.dynamic_index_in_dim(w, 1, keepdims=False), (3, 32, 8), (3, 1, 8)),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (32, 16), (1, 16)),
    "to float32": (lambda w, x: jnp.matmul(x, w, preferred_element_type=jnp.float32), (32, 16), (1, 16)),
    "an alias": (lambda w, x: (x @ w) @ w, (32, 32), (1, 32)),
    "nothing contracted": (lambda w, x: jnp.einsum("bs,d->bsd", x[..., 0], w), (16,), (16,)),
}
WEIGHTS_ALONE = ("x @ w", "two contracted", "batched last", "reshaped", "sliced", "a traced one of a stack", "cast")


@pytest.mark.parametrize(
    "form", [form if form in WEIGHTS_ALONE else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_a_parameter_keeps_its_codes_in_any_form_of_product(form: str, check: Any) -> None:
    fn, shape, scale = FORMS[form]
    report = check(lambda p, x: fn(p["w"], x), {"w": normal(1, *shape)}, X, tol=1e-2 if form == "cast" else 1e-5)
    assert scales(report) == {"w": scale}
    assert {row.reason for row in report.operations if row.paths} == {""}


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.slow) if form in WEIGHTS_ALONE[1:] else form for form in FORMS],
)
def test_activations_are_quantized_along_what_is_contracted(form: str, check: Any) -> None:
    fn, shape, scale = FORMS[form]
    report = check(lambda p, x: fn(p["w"], x), {"w": normal(1, *shape)}, X, rules=BOTH, tol=0.02)
    assert scales(report) == {"w": scale}
    kinds = {row.operands for row in report.operations if row.paths}
    assert kinds == {("int8", "int8/t32" if form == "part of an axis" else "int8")}


def test_tiles_lie_along_the_contracted_axis(check: Any) -> None:
    rules = (Rule(path=".*", weights="int4", activations="int8", tile_size=8),)
    report = check(lambda p, x: x @ p.T, normal(1, 16, 32), X, rules=rules, tol=0.02)
    assert [row.operands for row in report.operations] == [("int8/t8", "int4/t8")]
    assert scales(report) == {"": (16, 4)}


def test_tiles_over_several_contracted_axes_are_those_of_the_one_they_form(check: Any) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.einsum("bshk,hkd->bsd", x.reshape(2, 3, 4, 8), w)

    for tile, scale in ((4, (4, 2, 16)), (8, (4, 1, 16)), (16, (2, 1, 16))):
        report = check(fn, normal(1, 4, 8, 16), X, rules=(Rule(path=".*", weights="int4", tile_size=tile),))
        assert scales(report) == {"": scale}


BLOCKS = {
    "matrix": (lambda p, x: x @ p, (32, 16), (4, 4)),
    "transposed": (lambda p, x: x @ p.T, (16, 32), (4, 4)),
    "op": (lambda p, x: ops.linear(x, p), (32, 16), (4, 4)),
    "gated": (lambda p, x: ops.gated_linear_unit(x, p[0], p[1]), (2, 32, 16), (2, 4, 4)),
    "two kept axes": (lambda p, x: jnp.einsum("bsd,dhk->bshk", x, p), (32, 8, 2), (4, 4, 1)),
    "first of two kept axes": (lambda p, x: jnp.einsum("bsd,dhk->bshk", x, p), (32, 2, 8), (4, 2, 2)),
    "split in heads": (lambda p, x: jnp.einsum("bsd,dhk->bshk", x, p.reshape(32, 8, 2)), (32, 16), (4, 4)),
    "experts": (lambda p, x: jnp.einsum("bsd,edf->bsef", x, p), (4, 32, 16), (4, 4, 4)),
    "ragged": (lambda p, x: ops.ragged_dot(x[0], p, jnp.array([1, 2])), (2, 32, 16), (2, 4, 4)),
    "looked up": (lambda p, x: p[jnp.argmax(x[0], axis=1)], (32, 16), (32, 2)),
}


@pytest.mark.covering
@pytest.mark.parametrize(("weights", "activations"), [("int4", None), ("int8", "int8")])
@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_of_two_axes_share_a_scale(form: str, weights: str, activations: str | None, check: Any) -> None:
    fn, shape, scale = BLOCKS[form]
    rules = (Rule(path=".*", weights=weights, activations=activations, tile_size=(8, 4)),)
    report = check(fn, normal(1, *shape), X, rules=rules, tol=0.02 if activations else 1e-5)
    assert scales(report) == {"": scale} and "float" not in computed(report)


def test_blocks_that_do_not_divide_are_refused_or_made_smaller() -> None:
    rule = {"path": ".*", "weights": "int8", "tile_size": [128, 128]}
    fn, x, w = lambda p, x: x @ p["w"], normal(0, 2, 256), normal(1, 256, 192)
    with pytest.raises(
        ShapeError, match=r"tile of 128 outputs does not divide its kept axes \[1\], of shape \[256, 192\]"
    ):
        quantize_function(fn, {"w": w}, [rule], (x,))
    found = quantize_function(fn, {"w": w}, [rule | {"smaller_tiles": True}], (x,))
    assert found.params["w"].scale.shape == (2, 2)
    found = quantize_function(fn, {"w": w[:, :128]}, [rule], (x,))
    assert found.params["w"].scale.shape == (2, 1)
    with pytest.raises(RuleError, match="mxfp4"):
        quantize_function(fn, {"w": w}, [Rule(path=".*", weights="mxfp4", tile_size=(32, 2))], (x,))


@pytest.mark.parametrize("kind", ["int3", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp8", "mxfp4", "nvfp4"])
def test_every_type_of_weights(kind: str, check: Any) -> None:
    check(lambda w, x: x @ w.T, normal(1, 16, 32), X, rules=(Rule(path=".*", weights=kind),))


@pytest.mark.parametrize("kind", ["int4", "fp8_e4m3", "mxfp8"])
def test_every_type_of_activations(kind: str, check: Any) -> None:
    rules = (Rule(path=".*", weights="int8" if kind == "int4" else kind, activations=kind),)
    report = check(lambda w, x: x @ w, normal(1, 32, 16), X, rules=rules, tol=0.2)
    assert computed(report) == ["quantized"]


def test_asymmetric_activations_have_a_zero_point(check: Any) -> None:
    rules = (Rule(path=".*", weights="int8", activations="int8", activation_calibration="minmax"),)
    check(lambda w, x: x @ w, normal(1, 32, 16), jnp.abs(X), rules=rules, tol=0.01)


def test_two_activations_are_quantized_by_a_rule_on_the_operation(check: Any) -> None:
    def fn(params: Any, x: Any) -> Any:
        with jax.named_scope("attention"):
            logits = jnp.einsum("bsd,btd->bst", x, x)
        return jnp.einsum("bst,btd->bsd", logits, x) * params["scale"]

    params = {"scale": jnp.ones(32)}
    report = check(fn, params, X, rules=(Rule(op="attention", activations="fp8_e4m3"),), tol=0.2)
    assert [(row.operands, row.rule) for row in report.operations] == [
        (("fp8_e4m3", "fp8_e4m3"), 0),
        (("float32", "float32"), None),
    ]
    assert report.operations[1].reason == "no rule matches this product of activations"


def test_an_activation_of_a_parameters_shape_leaves_the_parameter_alone(check: Any) -> None:
    square = normal(2, 32, 32)
    rules = [Rule(path=".*", weights="int8", optional=True)]
    report = check(lambda p, x: (x[0].T @ x[0]) @ x[0].T + p["w"][:, :3], {"w": square}, X, rules=rules)
    assert scales(report) == {"w": None}
    assert [(row.paths, row.calls) for row in report.operations] == [((), 2)]


def test_a_precision_is_honoured() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.matmul(x, w, precision="highest", preferred_element_type=jnp.float32)

    w = normal(1, 32, 16, dtype="bfloat16")
    quantized = quantize_function(fn, w, [Rule(path=".*", weights="int8")], (X.astype(jnp.bfloat16),))
    jaxpr = jax.make_jaxpr(quantized.apply)(quantized.params, X.astype(jnp.bfloat16))
    (product,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general")
    assert product.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert product.params["preferred_element_type"] == jnp.float32


def split_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("rules", [WEIGHTS, BOTH], ids=["weights", "both"])
def test_a_requested_output_sharding_is_honoured(is_left: bool, rules: Any) -> None:
    """The contracted axis is split over devices, so the sharding of the result follows from no operand."""
    requested = P("tensor", None, None) if is_left else P("data", None, "tensor")
    with jax.set_mesh(split_mesh()):
        w = jax.device_put(
            normal(1, *((16, 32) if is_left else (32, 16))), P(*((None, "data") if is_left else ("data",)))
        )
        x = jax.device_put(X, P(None, None, "data"))

        def fn(w: Any, x: Any) -> Any:
            if is_left:
                return jnp.einsum("fd,bsd->fbs", w, x, out_sharding=requested)
            return jnp.einsum("bsd,df->bsf", x, w, out_sharding=requested)

        quantized = quantize_function(fn, w, list(rules), (x,))
        found = jax.jit(quantized.apply)(quantized.params, x)
        assert jax.typeof(jax.jit(fn)(w, x)).sharding.spec == requested
        assert jax.typeof(found).sharding.spec == requested
        np.testing.assert_allclose(found, fn(w, x), atol=0.5)


CONVOLUTIONS = {
    "NHWC": (("NHWC", "HWIO", "NHWC"), (2, 8, 8, 4), (3, 3, 4, 6), (1, 1, 1, 6), 1),
    "NCHW": (("NCHW", "OIHW", "NCHW"), (2, 4, 8, 8), (6, 4, 3, 3), (6, 1, 1, 1), 1),
    "groups": (("NHWC", "HWIO", "NHWC"), (2, 8, 8, 4), (3, 3, 2, 6), (1, 1, 1, 6), 2),
    "depthwise": (("NWC", "WIO", "NWC"), (2, 8, 4), (3, 1, 4), (1, 1, 4), 4),
}


@pytest.mark.parametrize(("form", "rules"), [*((form, BOTH) for form in CONVOLUTIONS), ("NCHW", WEIGHTS)])
def test_convolutions(form: str, rules: Any, check: Any) -> None:
    numbers, x_shape, shape, scale, groups = CONVOLUTIONS[form]

    def fn(w: Any, x: Any) -> Any:
        strides = (2,) * (len(x_shape) - 2)
        return lax.conv_general_dilated(
            x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups, rhs_dilation=strides
        )

    report = check(fn, normal(1, *shape), normal(2, *x_shape), rules=rules, tol=1e-5 if rules != BOTH else 0.02)
    assert scales(report) == {"": scale}
    assert computed(report) == ["quantized" if rules == BOTH else "dequantized"]


@pytest.mark.parametrize("rules", [(Rule(path=".*", weights="int8"),), BOTH])
def test_ragged_dot(rules: Any, check: Any) -> None:
    sizes = jnp.array([2, 0, 3], jnp.int32)
    fn = lambda w, x, sizes: lax.ragged_dot(x, w, sizes)
    report = check(fn, normal(1, 3, 32, 16), normal(2, 6, 32), sizes, rules=rules, tol=1e-5 if rules != BOTH else 0.02)
    assert scales(report) == {"": (3, 1, 16)}


@pytest.mark.parametrize("weights", ["int2", "int4", "int8"])
def test_products_of_constants_masks_and_ternary_weights_are_exact(weights: str) -> None:
    """Up to the last bit, since a scale such as 1/7 is rounded; the sums of codes are exact."""
    ternary = 2.0 * jnp.round(jnp.tanh(normal(3, 64, 4)))
    one_hot = jnp.eye(64)[jnp.asarray([0, 5, 63])]
    for activations in (None, weights):
        rule = Rule(path=".*", weights=weights, activations=activations)
        for w, x in ((jnp.ones((64, 4)), jnp.ones((2, 64))), (ternary, one_hot), (ternary, jnp.ones((2, 64)))):
            found = quantize_function(lambda p, x: x @ p, w, rule, (x,))(x)
            np.testing.assert_array_max_ulp(np.asarray(found), np.asarray(x @ w), maxulp=1)


def test_a_map_and_a_scan_give_the_same_codes() -> None:
    """The largest entry of a row is no tie between two codes, which programs with other roundings would break apart."""
    x, w = normal(4, 24, 64), normal(5, 64, 16)
    quantized = quantize_function(lambda p, x: x @ p, w, BOTH, (x,))
    mapped = jax.vmap(quantized)(x)
    scanned = lax.scan(lambda carry, row: (carry, quantized(row)), 0, x)[1]
    for found in (mapped, scanned):
        np.testing.assert_allclose(found, quantized(x), rtol=1e-5, atol=1e-4)


def test_what_derives_from_a_parameter_is_computed_from_its_rounded_value(check: Any) -> None:
    mask = jnp.where(normal(3, 32, 16) > 0, 1.0, 0.0)
    report = check(lambda w, x: x @ (w * mask), normal(1, 32, 16), X)
    assert scales(report) == {"": (1, 16)}
    reasons = [row.reason for row in report.operations]
    assert reasons == ["mul takes no quantized operand", "the operand is the result of mul on "]


def test_gradients_flow_through_quantized_products() -> None:
    w = normal(1, 32, 16)
    quantized = quantize_function(lambda w, x: x @ w, w, [Rule(path=".*", weights="int8")], (X,))
    gradient = jax.grad(lambda x: jnp.sum(quantized(x) ** 2))(X)
    expected = jax.grad(lambda x: jnp.sum((x @ w) ** 2))(X)
    assert jnp.linalg.norm(gradient - expected) < 0.02 * jnp.linalg.norm(expected)
    assert np.all(np.isfinite(gradient))


def joined(params: Any, axis: int) -> Any:
    return jnp.concatenate([params["q"], params["k"], params["v"]], axis)


CONCATENATED = {
    "on the right": lambda p, x: x @ joined(p, 1),
    "on the left": lambda p, x: joined(p, 0) @ x.T,
    "transposed": lambda p, x: x @ joined(p, 0).T,
    "of two batches": lambda p, x: jnp.einsum("bse,eo->bso", x.reshape(2, 2, 16), joined(p, 1)),
    "cast and in remat": lambda p, x: jax.checkpoint(jnp.matmul)(x.astype("bfloat16"), joined(p, 1).astype("bfloat16")),
}


@pytest.mark.parametrize("fn", CONCATENATED.values(), ids=CONCATENATED)
def test_concatenated_parameters_are_multiplied_each_by_its_rule(fn: Any, check: Any) -> None:
    params, x = {name: normal(seed, 16, 16) for seed, name in enumerate("qkv")}, normal(3, 4, 16)
    rules = [Rule(path="q", weights="int8", activations="int8"), Rule(path="k", weights="int4", tile_size=8)]
    report = check(fn, params, x, rules=rules, tol=0.02)
    expected = {("q",): "quantized", ("k",): "dequantized", ("v",): "float"}
    assert {row.paths: row.computed for row in report.operations} == expected


def test_what_a_product_sums_over_is_not_cut_and_the_reason_says_what_it_is_made_of() -> None:
    params, x = {"q": jnp.ones((8, 4)), "k": jnp.ones((8, 4))}, jnp.ones((2, 16))
    fn = lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 0)
    quantized = quantize_function(fn, params, [Rule(path="q|k", weights="int8", optional=True)], (x,))
    reasons = {row.reason for row in report(quantized).parameters}
    assert reasons == {"products use only the result of concatenate on it"}
    assert [row.reason for row in report(quantized).operations] == [
        "an operand is the result of concatenate on q and k"
    ]
