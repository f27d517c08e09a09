import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, Quantized, op_checks
from stack_kernels.linear import float_dot
from stack_kernels.linear.codes import columns, dequantized, interleaved
from stack_kernels.linear.xla_cpu_quantized import XLA_CPU_QUANTIZED, QuantizedConfig


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("linear"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU_QUANTIZED)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"]
)
def test_every_code_is_what_it_stands_for(dtype: str) -> None:
    bits = 4 if "4" in dtype.split("_", maxsplit=1)[0] else 8
    codes = jnp.asarray(np.arange(2**bits, dtype=np.uint8))
    if bits == 8:
        codes = jax.lax.bitcast_convert_type(codes, dtype).reshape(16, 16)
    else:
        codes = jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype).reshape(2, 8)
    array = Quantized(codes, jnp.full((2, 1), 0.75))
    expected = np.asarray(codes, np.float32) * np.float32(0.75)
    np.testing.assert_array_equal(jax.jit(lambda array: dequantized(array, jnp.float32))(array), expected)
    parts = jax.jit(lambda array: [part.dense(jnp.float32) for part in columns(array)])(array)
    np.testing.assert_array_equal(interleaved(parts), expected)


@pytest.mark.covering
@pytest.mark.parametrize("levels", [1, 5, 16, 40])
@pytest.mark.parametrize("codes", ["uint8", "int4", "int32"])
def test_codes_of_any_width_look_their_levels_up(codes: str, levels: int) -> None:
    drawn = np.arange(24).reshape(4, 6) % min(levels, jnp.iinfo(codes).max + 1)
    codebook = np.random.default_rng(0).normal(size=levels).astype(np.float32)
    weight = Quantized(jnp.asarray(drawn, codes), jnp.ones((1, 1)), None, jnp.asarray(codebook))
    parts = jax.jit(lambda weight: [part.dense(jnp.float32) for part in columns(weight)])(weight)
    np.testing.assert_array_equal(interleaved(parts), codebook[drawn])


# What stands below is beyond the contract's small calls: each form that a config or the rows choose, on one weight.
FORMS = {
    "fused": (1, QuantizedConfig(fused_rows=2, block_bytes=2**20)),
    "fused_two_rows": (2, QuantizedConfig(fused_rows=2, block_bytes=2**20)),
    "dense": (3, QuantizedConfig(fused_rows=0, block_bytes=2**20)),
    "blocks": (3, QuantizedConfig(fused_rows=0, block_bytes=2**9)),
    "blocks_in_tiles": (3, QuantizedConfig(fused_rows=0, block_bytes=2**11)),
}


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_forms_agree(tiles: int, dtype: str, form: str) -> None:
    rows, config = FORMS[form]
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-7, 8, size=(64, 32)), dtype)
    zeros = jnp.asarray(rng.integers(-3, 4, size=(tiles, 32)), jnp.int8)
    weight = Quantized(codes, jnp.asarray(rng.uniform(1, 2, size=(tiles, 32)), jnp.float32), zeros)
    x = jnp.asarray(rng.normal(size=(rows, 64)), jnp.float32)
    implementation = dataclasses.replace(XLA_CPU_QUANTIZED, default=lambda call, chip: config)
    found = jax.jit(lambda x, weight: ops.linear(x, weight, implementation=implementation))(x, weight)
    np.testing.assert_allclose(found, x @ ops.dequantize(weight, jnp.float32), rtol=2e-5, atol=2e-4)
    program = str(jax.make_jaxpr(lambda x, weight: ops.linear(x, weight, implementation=implementation))(x, weight))
    assert ("scan" in program) == form.startswith("blocks") and ("dot_general" in program) == ("fused" not in form)


@pytest.mark.parametrize("d_in", [8 * 2, 8 * 132, 8 * 131], ids=["two", "in_two_steps", "prime"])
def test_few_rows_are_summed_over_any_d_in(d_in: int) -> None:
    rng = np.random.default_rng(0)
    weight = Quantized(jnp.asarray(rng.integers(-127, 128, size=(d_in, 4)), jnp.int8), jnp.ones((1, 4)))
    x = rng.integers(-8, 9, size=(2, d_in)).astype(np.float32)
    found = jax.jit(lambda x, weight: ops.linear(x, weight, implementation=XLA_CPU_QUANTIZED))(x, weight)
    np.testing.assert_array_equal(found, x @ np.asarray(weight.values, np.float32))


def test_integers_are_multiplied_as_integers_in_long_tiles_only() -> None:
    def program(tile: int) -> str:
        x = Quantized(jnp.ones((3, 256), jnp.int8), jnp.ones((3, 256 // tile)))
        weight = Quantized(jnp.ones((256, 8), jnp.int4), jnp.ones((256 // tile, 8)))
        return str(jax.make_jaxpr(lambda *operands: ops.linear(*operands, implementation=XLA_CPU_QUANTIZED))(x, weight))

    assert "preferred_element_type=int32" in program(256) and "preferred_element_type=int32" in program(64)
    assert "preferred_element_type=int32" not in program(32)


@pytest.mark.parametrize("weights", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("activations", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_narrow_floats_are_exact_in_bf16(
    monkeypatch: pytest.MonkeyPatch, activations: str, weights: str
) -> None:
    monkeypatch.setattr(float_dot, "_has_tiles", lambda: True)
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], dtype: str, scales: tuple[int, ...]) -> Quantized:
        scale = jnp.asarray(rng.uniform(1, 2, size=scales), jnp.float32)
        return Quantized(jnp.asarray(rng.normal(size=shape), dtype), scale)

    def product(x: Quantized, weight: Quantized) -> jax.Array:
        return ops.linear(x, weight, implementation=XLA_CPU_QUANTIZED, preferred_dtype="float32")

    x, weight = drawn((3, 5, 96), activations, (3, 1, 1)), drawn((96, 10), weights, (1, 10))
    program = str(jax.make_jaxpr(product)(x, weight))
    assert "dot_general" in program and "bf16[96," in program
    exact = [np.asarray(array.values, np.float64) * np.asarray(array.scales, np.float64) for array in (x, weight)]
    expected = exact[0] @ exact[1]
    np.testing.assert_allclose(jax.jit(product)(x, weight), expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max())


def test_tiles_of_x_and_weight_that_differ() -> None:
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, int], scales: tuple[int, int]) -> Quantized:
        codes, zeros = (rng.integers(-100, 101, size=size) for size in (shape, scales))
        scale = jnp.asarray(rng.uniform(1, 2, size=scales), jnp.float32)
        return Quantized(jnp.asarray(codes, jnp.int8), scale, jnp.asarray(zeros, jnp.int8))

    x, weight = drawn((3, 384), (3, 2)), drawn((384, 8), (3, 4))
    found = ops.linear(x, weight, implementation=XLA_CPU_QUANTIZED)
    expected = np.asarray(ops.dequantize(x, "float32"), float) @ np.asarray(ops.dequantize(weight, "float32"), float)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_it_leaves_plain_and_double_precision_calls_to_others() -> None:
    weight = Quantized(jnp.ones((4, 2), jnp.int8), jnp.ones((1, 2)))
    with pytest.raises(UnsupportedOp, match="no operand is quantized"):
        ops.linear(jnp.ones((3, 4)), jnp.ones((4, 2)), implementation="xla_cpu_quantized")
    with jax.enable_x64(True), pytest.raises(UnsupportedOp, match="float64"):
        ops.linear(jnp.ones((3, 4), jnp.float64), weight, implementation="xla_cpu_quantized")


def test_sums_of_unsigned_codes_do_not_overflow() -> None:
    tokens, d_in = 2, 2**16
    x = Quantized(jnp.full((tokens, d_in), 255, jnp.uint8), jnp.ones((tokens, 1)))
    weight = Quantized(jnp.full((d_in, 1), 255, jnp.uint8), jnp.ones((1, 1)))
    result = ops.linear(x, weight, implementation=XLA_CPU_QUANTIZED)
    np.testing.assert_allclose(result, 255.0**2 * d_in, rtol=1e-4)
