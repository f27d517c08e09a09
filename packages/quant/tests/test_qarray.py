import dataclasses
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import OpImplementation
from stack_core.abi.plugins import registries
from stack_core.testing import TOLERANCES, assert_close
from stack_quant import ArraySpec, Rule, dequantize, quantize_array, quantize_function
from stack_quant.qtypes import QTYPES


def spec_of(name: str, *leading: int, **settings: object) -> ArraySpec:
    axis = len(leading)
    tile = QTYPES[name].block_size or 8
    return ArraySpec(type=name, channel_axes=(*leading, axis + 1), tiles={axis: tile}, **settings)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", QTYPES)
def test_the_view_is_the_array(name: str) -> None:
    array = quantize_array(drawn(64, 6), spec_of(name))
    view = array.__stack_qview__()
    assert view.qvalue.dtype == QTYPES[name].code_dtype and view.qvalue.shape == array.shape == (64, 6)
    codes = np.asarray(view.qvalue.astype(jnp.float32))
    values = codes if view.codebook is None else np.asarray(view.codebook)[codes.astype(int)]
    scale = np.repeat(np.asarray(view.scale), 64 // view.scale.shape[0], axis=0)
    np.testing.assert_allclose(dequantize(array), values * scale, rtol=1e-6)
    assert dequantize(array, jnp.bfloat16).dtype == jnp.bfloat16


def test_numpy_sees_what_it_stands_for() -> None:
    array = quantize_array(drawn(16, 6).astype(jnp.bfloat16), spec_of("int4"))
    for dtype in (None, np.float64):
        found = np.asarray(array, dtype)
        assert found.dtype == (dtype or jnp.bfloat16) and found.shape == (16, 6)
        np.testing.assert_array_equal(found, np.asarray(dequantize(array), found.dtype))
    with pytest.raises(ValueError, match=r"makes a copy\. Leave out copy=False"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("index", [3, -1, np.int32(-2), jnp.asarray([[0, -1], [5, 20]]), np.array([1], np.uint8)])
def test_rows_are_taken_from_codes(index: object) -> None:
    array = quantize_array(drawn(16, 6), spec_of("int8"))
    np.testing.assert_allclose(array[index], dequantize(array)[index], rtol=1e-6)
    mapped = jax.vmap(lambda index: array[index])(jnp.asarray([3, -1]))
    np.testing.assert_allclose(mapped, dequantize(array)[jnp.asarray([3, -1])], rtol=1e-6)
    for text in (
        str(jax.make_jaxpr(lambda index: array[index])(index)),
        str(jax.make_jaxpr(jax.vmap(lambda index: array[index]))(jnp.asarray([3, -1]))),
    ):
        assert "i8[16,6]" in text and "f32[16,6]" not in text


# One of each form of storage: planes of bits, nibbles, bytes, a codebook, and scales of blocks with and without a unit.
STORED = ("int3", "int4", "fp8_e4m3", "nf4", "mxfp4", "nvfp4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in STORED else pytest.mark.slow) for name in QTYPES]
)
def test_stacks_slice_under_scan(name: str) -> None:
    stack = quantize_array(drawn(3, 64, 6), spec_of(name, 0))
    x = drawn(2, 64)
    _, found = jax.jit(lambda x, stack: jax.lax.scan(lambda x, layer: (x, ops.linear(x, layer)), x, stack))(x, stack)
    for place in range(3):
        layer = jax.tree.map(operator.itemgetter(place), stack)
        np.testing.assert_allclose(found[place], x @ dequantize(layer), rtol=2e-5, atol=2e-5)
    vmapped = jax.vmap(lambda layer: ops.linear(x, layer))(stack)
    np.testing.assert_allclose(vmapped, found, rtol=2e-5, atol=2e-5)
    donated = jax.jit(lambda stack: stack, donate_argnums=0)(jax.tree.map(jnp.copy, stack))
    assert jax.tree.structure(donated) == jax.tree.structure(stack)


@pytest.mark.parametrize(("name", "bits"), [("int3", 3), ("int4", 4), ("int8", 8), ("nf4", 4), ("fp4", 4)])
def test_bytes_are_those_of_its_bits(name: str, bits: int) -> None:
    assert quantize_array(drawn(64, 16), spec_of(name)).nbytes == 64 * 16 * bits // 8 + 8 * 16 * 4
    if name != "int8":
        assert (
            quantize_array(drawn(64, 16), spec_of(name, double_quantized=True)).nbytes
            == 64 * 16 * bits // 8 + 8 * 16 + 16 * 4
        )


def test_what_scales_and_schemes_are() -> None:
    assert quantize_array(drawn(64, 6), spec_of("nvfp4")).scale.dtype == "float8_e4m3fn"
    assert quantize_array(drawn(64, 6), spec_of("nvfp4")).scale_unit.shape == (1, 6)
    mx = quantize_array(drawn(64, 6), spec_of("mxfp4"))
    assert mx.scale.dtype == "float8_e8m0fnu" and mx.scale_unit is None and mx.scheme == "mxfp4/t32"
    asymmetric = quantize_array(drawn(64, 6), spec_of("int4", symmetric=False))
    assert asymmetric.zero_point.dtype == "int8" and asymmetric.zero_point.shape == asymmetric.scale.shape
    assert (asymmetric.ndim, asymmetric.size, asymmetric.dtype) == (2, 384, "float32")


IMPLEMENTATIONS = [name for name in registries.ops.names() if name.startswith("linear/")]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        *((name, True) for name in QTYPES),
        *(
            pytest.param(name, False, marks=() if name in ("int3", "int8") else pytest.mark.slow)
            for name, kind in QTYPES.items()
            if kind.is_integer  # others have no zero point
        ),
    ],
)
def test_ops_take_it_in_value_and_gradient(name: str, symmetric: bool, implementation: str) -> None:
    """As the contract of `linear` asks: against float64, the gradients of float32 scales included."""
    found: OpImplementation = registries.ops[implementation]
    weight, x = quantize_array(drawn(64, 6), spec_of(name, symmetric=symmetric)), drawn(5, 64)
    if not implementation.endswith(("reference", "quantized")):
        pytest.skip(f"{implementation} takes no quantized operand")

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        return ops.linear(x, dataclasses.replace(weight, scale=scale), implementation=found)

    output, vjp = jax.vjp(run, x, weight.scale)
    cotangent = drawn(5, 6)
    of_x, of_scale = vjp(cotangent)
    dense = np.asarray(dequantize(weight), np.float64)
    expected = [np.asarray(x, np.float64) @ dense, np.asarray(cotangent, np.float64) @ dense.T]
    actual = [output, of_x]
    if weight.scale.dtype == jnp.float32:
        of_weight = np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64)
        tile = 64 // weight.scale.shape[0]
        per_tile = (of_weight * dense).reshape(-1, tile, 6).sum(axis=1) / np.asarray(weight.scale, np.float64)
        expected, actual = [*expected, per_tile], [*actual, of_scale]
    assert_close((actual[0], actual[1:]), (expected[0], expected[1:]), 4 * TOLERANCES["float32"])


@pytest.mark.parametrize(("name", "most"), [("nf4", 0.10), ("fp4", 0.13)])
def test_orbax_saves_and_restores_codes_of_four_bits(name: str, most: float, tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint", reason="needs orbax: install stack-quant[flax]")
    weight = drawn(256, 32)
    spec = ArraySpec(type=name, channel_axes=(1,), tiles={0: 64}, double_quantized=True)
    saved = {"kernel": quantize_array(weight, spec)}
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        places = jax.tree.map(lambda leaf: orbax.ArrayRestoreArgs(dtype=leaf.dtype, sharding=leaf.sharding), saved)
        found = checkpointer.restore(tmp_path / "checkpoint", item=saved, restore_args=places)
    kernel = found["kernel"]
    assert (kernel.type, kernel.planes[0].dtype, kernel.nbytes) == (name, jnp.int4, saved["kernel"].nbytes)
    np.testing.assert_array_equal(dequantize(kernel), dequantize(saved["kernel"]))
    assert jnp.linalg.norm(dequantize(kernel) - weight) <= most * jnp.linalg.norm(weight)


SIZES, LABELS = jnp.array([2, 3], jnp.int32), jnp.array([1, 0, 3, -100, 2])
TAKEN = {
    "linear": ((64, 6), ops.linear),
    "gated_linear_unit": ((64, 6), lambda x, w: ops.gated_linear_unit(x, w, w)),
    "ragged_dot": ((2, 64, 6), lambda x, w: ops.ragged_dot(x, w, SIZES)),
    "linear_cross_entropy": ((64, 6), lambda x, w: ops.linear_cross_entropy(x, w, LABELS)),
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, marks=() if name in ("int8", "nvfp4") else pytest.mark.slow)
        for op in TAKEN
        for name in ("int8", "int3", "fp8_e5m2", "nf4", "mxfp4", "nvfp4")
    ],
)
def test_values_and_gradients_are_those_of_what_it_stands_for(op: str, name: str) -> None:
    shape, call = TAKEN[op]
    x, weight = drawn(5, 64), quantize_array(drawn(*shape), spec_of(name, *range(len(shape) - 2)))
    found, expected = (
        jax.value_and_grad(lambda x, w=w: jnp.sum(call(x, w) ** 2))(x) for w in (weight, dequantize(weight))
    )
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_scales_of_nvfp4_by_a_rule_have_one_unit_for_each_matrix() -> None:
    def scanned(params, x):
        return jax.lax.scan(lambda carry, w: (carry + carry @ w, None), x, params["w"])[0]

    x = drawn(4, 32)
    for algorithm in (None, "gptq"):
        rule = Rule(path="w", weights="nvfp4", algorithm=algorithm)
        held = quantize_function(scanned, {"w": drawn(2 * 32, 32).reshape(2, 32, 32)}, rule, (x,), stream=[(x,)])
        assert held.params["w"].scale_unit.shape == (2, 1, 1)
