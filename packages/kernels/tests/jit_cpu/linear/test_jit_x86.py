import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.ops import OpCall, QView
from stack_core.chips import current_chip
from stack_core.testing import OpCheck, Quantized, op_checks
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.linear.jit_x86 import JIT_X86, few_rows_product
from stack_kernels.linear.codes import QuantizedView

_COLUMNS = (2, 50, 128, 300)  # less than a vector; all but whole; a tile; tiles and a rest
_ROWS = (1, 2, 3, 8, 21)


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("linear"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(JIT_X86)


@pytest.mark.covering(2)
@pytest.mark.parametrize("columns", _COLUMNS)
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_of_any_size_are_exact_to_fp32(processor: Processor, dtype: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, 68), (68, columns)))
    _assert_equal(_product(x, weight), np.asarray(x, np.float64) @ np.asarray(weight, np.float64))


@pytest.mark.covering
@pytest.mark.parametrize("depth", [8, 136, 1408])
@pytest.mark.parametrize("columns", [3, 300, 4100])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_or_two_rows_are_summed_in_parts(
    processor: Processor, dtype: str, rows: int, columns: int, depth: int
) -> None:
    rng = np.random.default_rng(depth)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, depth), (depth, columns)))
    _assert_equal(_product(x, weight), np.asarray(x, np.float64) @ np.asarray(weight, np.float64))


@pytest.mark.covering
@pytest.mark.parametrize("columns", _COLUMNS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_every_code_is_read_as_its_value(processor: Processor, dtype: str, columns: int) -> None:
    bits = 4 if dtype in ("int4", "uint4", "float4_e2m1fn") else 8
    drawn = np.random.default_rng(2).integers(0, 2**bits, size=(64, columns)).astype(np.uint8)
    codes = jax.lax.bitcast_convert_type(jnp.asarray(drawn, f"uint{bits}"), dtype)
    codes = jnp.where(jnp.isfinite(codes.astype(jnp.float32)), codes, jnp.zeros_like(codes))
    scale = np.random.default_rng(0).uniform(1, 2, size=(4, columns)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    weight = np.asarray(codes, np.float64) * np.repeat(scale, 16, axis=0)
    _assert_equal(_product(x, Quantized(codes, scale)), x.astype(np.float64) @ weight)


@pytest.mark.covering
@pytest.mark.parametrize("tile", [16, 24])
@pytest.mark.parametrize("columns", _COLUMNS)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
def test_zero_points_of_tiles_are_subtracted(
    processor: Processor, dtype: str, rows: int, columns: int, tile: int
) -> None:
    bits, rng = (8 if dtype == "int8" else 4), np.random.default_rng(tile)
    drawn = jnp.asarray(rng.integers(0, 2**bits, size=(6 * tile, columns)).astype(np.uint8), f"uint{bits}")
    codes = jax.lax.bitcast_convert_type(drawn, dtype)
    scale, zero_point = (rng.uniform(1, 2, size=(6, columns)).astype(np.float32) for _ in range(2))
    x = rng.normal(size=(rows, 6 * tile)).astype(np.float32)
    values = np.asarray(codes, np.float64) - np.repeat(zero_point, tile, axis=0)
    view = QView((1, 0), codes, jnp.asarray(scale), jnp.asarray(zero_point), "zero points")
    found = jax.jit(lambda x: few_rows_product(x, QuantizedView(view)))(x)
    _assert_equal(found, x.astype(np.float64) @ (values * np.repeat(scale, tile, axis=0)))


@pytest.mark.covering
@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("rows", [4096, 4101])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_many_rows_of_a_table_are_multiplied_with_few_columns(
    processor: Processor, dtype: str, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(rows)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, 48), (48, columns)))
    call = OpCall("linear", {"x": x, "weight": weight, "bias": None}, {})
    assert JIT_X86.supports(call, current_chip()) is True
    _assert_equal(_product(x, weight), np.asarray(x, np.float64) @ np.asarray(weight, np.float64))


@pytest.mark.covering
@pytest.mark.parametrize("scales", [1, 4100])
@pytest.mark.parametrize("depth", [12, 136, 1408])
def test_one_row_of_int8_codes_is_summed_in_parts(processor: Processor, depth: int, scales: int) -> None:
    rng = np.random.default_rng(depth)
    codes = rng.integers(-128, 128, size=(depth, 4100)).astype(np.int8)
    x, scale = rng.normal(size=(1, depth)).astype(np.float32), rng.uniform(1, 2, size=(1, scales)).astype(np.float32)
    _assert_equal(_product(x, Quantized(codes, scale)), x.astype(np.float64) @ (codes * scale.astype(np.float64)))


def test_nan_among_fp8_codes_stays_in_its_column(processor: Processor) -> None:
    codes = np.ones((16, 20), "float8_e4m3fn")
    codes[3, 7] = np.nan
    found = _product(np.ones((2, 16), np.float32), Quantized(codes, np.ones((1, 20), np.float32)))
    assert np.isnan(found[:, 7]).all()
    np.testing.assert_array_equal(np.delete(found, 7, axis=1), 16)


@pytest.mark.covering
@pytest.mark.parametrize("levels", [3, 16])
def test_codes_are_looked_up_in_a_codebook(processor: Processor, levels: int) -> None:
    rng = np.random.default_rng(levels)
    codebook = rng.normal(size=levels).astype(np.float32)
    codes = jnp.asarray(rng.integers(0, levels, size=(32, 70)), jnp.uint4)
    scale = rng.uniform(1, 2, size=(2, 70)).astype(np.float32)
    x = rng.normal(size=(5, 32)).astype(np.float32)
    weight = codebook[np.asarray(codes, int)].astype(np.float64) * np.repeat(scale, 16, axis=0)
    _assert_equal(_product(x, Quantized(codes, scale, codebook=jnp.asarray(codebook))), x.astype(np.float64) @ weight)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["uint4", "float4_e2m1fn"])
def test_codes_that_are_kept_as_int4_are_not_converted(processor: Processor, dtype: str) -> None:
    """XLA does that one by one, which takes many times as long as the product."""

    def product(x: jax.Array, kept: jax.Array) -> jax.Array:
        weight = Quantized(jax.lax.bitcast_convert_type(kept, dtype), jnp.ones((1, 64)))
        return JIT_X86.forward(x=x, weight=weight, bias=None, preferred_dtype="float32", requested=frozenset())[0]

    compiled = jax.jit(product).lower(jnp.ones((2, 32)), jnp.ones((32, 64), jnp.int4)).compile()
    assert "custom-call" in compiled.as_text() and "bitcast-convert" not in compiled.as_text()


@pytest.mark.covering
@pytest.mark.parametrize(("x_tiles", "tiles"), [(1, 3), (3, 1), (2, 3)])
def test_tiles_of_integers_that_differ(processor: Processor, x_tiles: int, tiles: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-128, 128, size=shape).astype(np.int8) for shape in ((5, 48), (48, 70)))
    x_scale, scale = (rng.uniform(1, 2, size=shape).astype(np.float32) for shape in ((5, x_tiles), (tiles, 70)))
    wide = x * np.repeat(x_scale, 48 // x_tiles, axis=1).astype(np.float64)
    exact = wide @ (weight * np.repeat(scale, 48 // tiles, axis=0))
    _assert_equal(_product(Quantized(x, x_scale), Quantized(weight, scale)), exact)


@pytest.mark.covering
@pytest.mark.parametrize("columns", _COLUMNS)
@pytest.mark.parametrize("rows", _ROWS)
def test_integer_products_are_exact_at_the_ends_of_their_range(processor: Processor, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight = (rng.choice([-128, -127, 127, 3], size=shape).astype(np.int8) for shape in ((rows, 48), (48, columns)))
    x_scale, scale = (rng.uniform(1, 2, size=shape).astype(np.float32) for shape in ((rows, 3), (3, columns)))
    exact = (x * np.repeat(x_scale, 16, axis=1).astype(np.float64)) @ (weight * np.repeat(scale, 16, axis=0))
    _assert_equal(_product(Quantized(x, x_scale), Quantized(weight, scale)), exact)


@pytest.mark.covering
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 8, 2), (1, 136, 300), (1, 2048, 50), (5, 1032, 8200)])
def test_streams_of_integers_are_exact(processor: Processor, rows: int, depth: int, columns: int) -> None:
    """Of one row, and of several with a weight that is not in the caches."""
    rng = np.random.default_rng(depth)
    x, weight = (
        rng.choice([-128, -127, 127, 3], size=shape).astype(np.int8) for shape in ((rows, depth), (depth, columns))
    )
    x_scale, scale = (rng.uniform(1, 2, size=shape).astype(np.float32) for shape in ((rows, 1), (1, columns)))
    exact = (x * x_scale.astype(np.float64)) @ (weight * scale.astype(np.float64))
    _assert_equal(_product(Quantized(x, x_scale), Quantized(weight, scale)), exact)
    call = {"bias": None, "preferred_dtype": "float32", "requested": frozenset()}
    program = str(
        jax.make_jaxpr(lambda x, weight: JIT_X86.forward(x=x, weight=weight, **call)[0])(
            Quantized(x, x_scale), Quantized(weight, scale)
        )
    )
    assert (f"linear_streams_{rows}_int8_int8" in program) == processor.has_int8_dot


@pytest.mark.parametrize("depth", [2**16, 2**18])
def test_integer_products_do_not_overflow(depth: int) -> None:
    x, weight = (np.full(shape, value, np.int8) for shape, value in (((3, depth), -128), ((depth, 16), 127)))
    found = _product(Quantized(x, np.ones((3, 1), np.float32)), Quantized(weight, np.ones((1, 16), np.float32)))
    np.testing.assert_allclose(found, -128.0 * 127 * depth, rtol=1e-2)  # equal terms round alike in an fp32 sum


@pytest.mark.covering
@pytest.mark.parametrize("tiles", [1, 2, 40])
@pytest.mark.parametrize("columns", [40, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
def test_long_sums_of_many_rows_come_in_parts(processor: Processor, dtype: str, columns: int, tiles: int) -> None:
    rng = np.random.default_rng(tiles)
    x, weight = rng.normal(size=(30, 1280)), rng.normal(size=(1280, columns))
    if dtype in ("float32", "bfloat16"):
        operands = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
        values: Any = operands
    else:
        codes = np.rint(x * 30).astype(np.int8), (np.rint(weight * 30) if dtype == "int8" else weight).astype(dtype)
        scales = (rng.uniform(1, 2, size=shape).astype(np.float32) for shape in ((30, tiles), (tiles, columns)))
        operands = tuple(map(Quantized, codes, scales))
        values = (
            np.asarray(codes[0], float) * np.repeat(operands[0].scales, 1280 // tiles, axis=1),
            np.asarray(codes[1], float) * np.repeat(operands[1].scales, 1280 // tiles, axis=0),
        )
    _assert_equal(_product(*operands), np.asarray(values[0], np.float64) @ np.asarray(values[1], np.float64))


def test_several_threads_take_their_share_of_many_calls() -> None:
    """Of products that do not wait for each other, over and over: a tile that is lost or done twice would show."""
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(32, 1280)), jnp.float32) for _ in range(4)]
    x = jnp.asarray(rng.normal(size=(3, 32)), jnp.float32)

    @jax.jit
    def products(x: Any) -> list[Any]:
        return [ops.linear(x, weight, implementation=JIT_X86) for weight in weights]

    expected = [np.asarray(x, np.float64) @ np.asarray(weight, np.float64) for weight in weights]
    for _ in range(200):
        for found, exact in zip(products(x), expected, strict=True):
            _assert_equal(found, exact)


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        ((65, 8), jnp.zeros((8, 4)), "64 rows or fewer, and x has 65"),
        ((2, 8), Quantized(jnp.zeros((8, 3), jnp.int4), jnp.ones((1, 3))), "share a byte"),
        ((2, 8), Quantized(jnp.zeros((8, 4), jnp.int2), jnp.ones((1, 4))), "does not read"),
        ((2, 8), Quantized(jnp.zeros((8, 4), jnp.uint8), jnp.ones((1, 4)), codebook=jnp.zeros(256)), "16 levels"),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_reason(x: tuple[int, int], weight: Any, reason: str) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        ops.linear(jnp.zeros(x), weight, implementation=JIT_X86)


@pytest.mark.parametrize(
    ("rows", "has_tiles", "name"), [(8, True, "jit_x86"), (9, True, "xla_cpu"), (9, False, "jit_x86")]
)
def test_more_than_eight_rows_go_where_tiles_of_their_type_are_multiplied(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, rows: int, has_tiles: bool, name: str
) -> None:
    monkeypatch.setattr(host, "this_processor", lambda: dataclasses.replace(processor, has_tiles=has_tiles))

    def chosen(x: Any, weight: Any) -> str:
        (decision,) = ops.explain(ops.linear, x, weight)
        return decision.forward.implementation.name

    def quantized(shape: tuple[int, int], dtype: str) -> Quantized:
        return Quantized(jnp.zeros(shape, dtype), jnp.ones((1, 1)))

    assert chosen(jnp.zeros((rows, 8), "bfloat16"), jnp.zeros((8, 4), "bfloat16")) == name
    assert chosen(jnp.zeros((rows, 8)), jnp.zeros((8, 4))) == "jit_x86"
    assert chosen(quantized((rows, 8), "int8"), quantized((8, 4), "int8")).startswith(name)
    assert chosen(jnp.zeros((rows, 8)), quantized((8, 4), "int8")) == "jit_x86"
    assert chosen(quantized((rows, 8), "int8"), quantized((8, 4), "int4")) == "jit_x86"


def test_another_cpu_than_this_one_gets_another_implementation() -> None:
    arrays = jnp.zeros((2, 8)), jnp.zeros((8, 4))
    (here,) = ops.explain(ops.linear, *arrays)
    elsewhere_chip = dataclasses.replace(current_chip(), model="another processor, 2 cores")
    (elsewhere,) = ops.explain(ops.linear, *arrays, chip=elsewhere_chip)
    assert (here.forward.implementation.name, elsewhere.forward.implementation.name) == ("jit_x86", "xla_cpu")
    assert "the target is another processor" in dict(elsewhere.forward.refused)["jit_x86"]


def _product(x: Any, weight: Any) -> np.ndarray:
    """Of a row of fp32 with an fp32 weight too: that XLA is as fast there is no reason to be wrong."""
    arrays = jax.tree.map(jnp.asarray, (x, weight))
    return np.asarray(
        jax.jit(
            lambda x, weight: JIT_X86.forward(
                x=x, weight=weight, bias=None, preferred_dtype="float32", requested=frozenset()
            )[0]
        )(*arrays)
    )


def _assert_equal(found: Any, exact: np.ndarray) -> None:
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
