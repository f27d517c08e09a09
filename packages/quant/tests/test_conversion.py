import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, UnknownName
from stack_quant import ArraySpec, Range, dequantize, fake_quantize, quantize_array
from stack_quant import blocks as blocks_module
from stack_quant.qtypes import QTYPES

SLOW = pytest.mark.slow
# Integers of 5 to 7 bits are slow: their codes are those of int8, and test_packing.py packs all.
MARKS = {name: SLOW if name in ("int5", "int6", "int7") else () for name in QTYPES}


def drawn(shape: tuple[int, ...], dtype: Any = jnp.float32, std: float = 1.0, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=std, size=shape), dtype)


def error(spec: ArraySpec, x: jax.Array, **settings: Any) -> float:
    exact = np.asarray(x, np.float64)
    found = np.asarray(dequantize(quantize_array(x, spec, **settings), jnp.float32), np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def tiled(name: str, tile_size: int = 128, **settings: Any) -> ArraySpec:
    return ArraySpec(type=name, channel_axes=(1,), tiles={0: QTYPES[name].block_size or tile_size}, **settings)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (ArraySpec(type="int8", channel_axes=(1,)), 0.0080),
        (tiled("int4"), 0.113),
        (tiled("int4", symmetric=False), 0.103),
        (tiled("int3"), 0.245),
        (tiled("int6"), 0.027),
        (tiled("fp8_e4m3"), 0.0262),
        (tiled("fp8_e5m2"), 0.0522),
        (tiled("fp4"), 0.111),
        (tiled("nf4"), 0.0975),
        (tiled("nf4", double_quantized=True), 0.0975),
        (tiled("mxfp8"), 0.027),
        (tiled("mxfp4"), 0.117),
        (tiled("nvfp4"), 0.0965),
    ],
    ids=lambda value: (
        f"{value.type}-{value.symmetric}-{value.double_quantized}" if isinstance(value, ArraySpec) else ""
    ),
)
def test_gaussian_weights(spec: ArraySpec, most: float) -> None:
    assert 0.9 * most < error(spec, drawn((512, 256))) < most


@pytest.mark.parametrize(
    ("dtype", "std"), [("float16", 0.01), ("bfloat16", 0.01), ("float16", 1e-6), ("bfloat16", 1e-30)]
)
def test_small_weights_keep_their_scale(dtype: str, std: float) -> None:
    """A guard of sqrt(tiny) in the array's own dtype turns fp16 weights of std 0.01 to zeros."""
    spec = ArraySpec(type="int8", channel_axes=(1,))
    assert error(spec, drawn((512, 256), dtype, std)) <= 0.0075


def test_nvfp4_of_small_weights_has_its_second_scale() -> None:
    assert error(tiled("nvfp4"), drawn((512, 64), std=0.002)) <= 0.11


@pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        *((name, True) for name in QTYPES),
        *(
            pytest.param(name, False, marks=() if name in ("int2", "int8") else SLOW)
            for name, kind in QTYPES.items()
            if kind.is_integer  # others have no zero point
        ),
    ],
)
def test_tiles_of_zeros_and_of_subnormals(name: str, symmetric: bool) -> None:
    size = QTYPES[name].block_size or 8
    x = jnp.zeros((4, size, 2)).at[1].set(1e-40).at[2].set(1.0).at[3].set(1e37)
    spec = ArraySpec(type=name, channel_axes=(0, 2), tiles={1: size}, symmetric=symmetric)
    found = np.asarray(dequantize(quantize_array(x, spec)))
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1], 0, atol=1e-37)
    for place, value in ((2, 1.0), (3, 1e37)):
        np.testing.assert_allclose(found[place], value, rtol=0.35 if name == "int2" else 0.15)


def test_nan_and_infinities_are_named() -> None:
    x = drawn((4, 8)).at[1, 2].set(jnp.nan).at[3, 3].set(-jnp.inf)
    for calibration in ("absmax", "minmax", "mse", "percentile,50", "fixed,1", "rms,3"):
        with pytest.raises(
            ArgumentError, match=r"layers/3/mlp holds 1 NaN and 1 infinite .* of 32, the first at \(1, 2\)"
        ):
            quantize_array(x, ArraySpec(calibration=calibration), name="layers/3/mlp")
    with pytest.raises(ArgumentError, match="w has dtype int32; only floating"):
        quantize_array(jnp.ones(3, jnp.int32), ArraySpec(), name="w")


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_compiled_programs_do_not_hide_what_is_not_finite(name: str) -> None:
    run = jax.jit(lambda x: dequantize(quantize_array(x, tiled(name, tile_size=32))))
    for value in (np.nan, np.inf, -np.inf):
        found = run(drawn((64, 2)).at[3, 0].set(value))
        assert np.all(np.isnan(found[:16, 0]) | np.isinf(found[:16, 0]))
        assert np.all(np.isfinite(found[:, 1])) or name == "nvfp4"  # whose columns have a second scale in common


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(pytest.param(name, {}, marks=marks) for name, marks in MARKS.items()),
        ("nf4", {"double_quantized": True}),
        ("int4", {"symmetric": False}),
        *(
            pytest.param(name, settings, marks=SLOW)
            for name, kind in QTYPES.items()
            for settings, exists in (
                ({"double_quantized": True}, name != "nf4" and not kind.block_size),
                ({"symmetric": False}, name != "int4" and kind.is_integer),
            )
            if exists
        ),
    ],
)
def test_stochastic_rounding_clips_nothing(name: str, settings: dict[str, bool]) -> None:
    """The mean over keys is the array, the largest entries of each tile included."""
    spec = ArraySpec(type=name, channel_axes=(1,), tiles={0: QTYPES[name].block_size or 16}, **settings)
    x = drawn((32, 4))
    keys = jax.random.split(jax.random.key(1), 2000)
    found = jax.jit(jax.vmap(lambda key: dequantize(quantize_array(x, spec, key=key))))(keys)
    found = np.asarray(found, np.float64)
    # Of the mean of values that are either of two, half a step apart at most from their mean.
    most = 5 * found.std(axis=0) / np.sqrt(len(keys)) + 1e-3 * np.abs(np.asarray(x)).max()
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - np.asarray(x)), most)


def test_a_given_range_is_used() -> None:
    x = drawn((8, 4))
    for ends, high in (("fitted", 127), ("exact", 127), ("half_step", 127.5)):
        span = Range(None, jnp.full((1, 1), high, jnp.float32))
        found = quantize_array(100 * x, ArraySpec(range_ends=ends), range=span)
        np.testing.assert_array_equal(found.codes, np.clip(np.round(100 * x), -127, 127))


EXACT = jnp.concatenate(
    [
        jnp.ones((16, 1)),
        jnp.full((16, 1), -1 / 3),
        (drawn((16, 4)) > 0).astype(jnp.float32),  # masks
        jax.nn.one_hot(jnp.arange(16) % 8, 8),
        0.7 * jnp.sign(jnp.round(drawn((16, 4)))),  # ternary weights
    ],
    axis=1,
)


@pytest.mark.covering
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int2", "int4", "int8"])
def test_constants_stay_exact_and_each_tile_has_the_smaller_error(name: str, symmetric: bool) -> None:
    x = jnp.concatenate([EXACT, drawn((16, 8))], axis=1)

    def rounded(ends: str) -> np.ndarray:
        spec = ArraySpec(type=name, channel_axes=(1,), tiles={0: 8}, symmetric=symmetric, range_ends=ends)
        found = dequantize(quantize_array(x, spec))
        np.testing.assert_array_equal(fake_quantize(x, spec), found)
        return np.asarray(found, np.float64)

    def errors(found: np.ndarray) -> np.ndarray:
        return np.square(found - x).reshape(2, 8, -1).sum(axis=1)

    fitted, exact, half_step = map(rounded, ("fitted", "exact", "half_step"))
    for found in (fitted, exact):
        np.testing.assert_allclose(found[:, : EXACT.shape[1]], EXACT, rtol=3e-7)
    np.testing.assert_allclose(errors(fitted), np.minimum(errors(exact), errors(half_step)), rtol=1e-4, atol=1e-12)
    assert np.any(errors(fitted) < errors(exact) - 1e-6) and np.any(errors(fitted) < errors(half_step) - 1e-6)


@pytest.mark.parametrize(("name", "bound"), [("int8", 127.5), ("int4", 7.5), ("int2", 1.5)])
def test_half_step_is_qwix_convention(name: str, bound: float) -> None:
    x = drawn((128, 4))
    found = quantize_array(x, ArraySpec(type=name, channel_axes=(1,), range_ends="half_step"))
    np.testing.assert_allclose(found.scale, np.abs(x).max(axis=0, keepdims=True) / bound, rtol=1e-6)


@pytest.mark.parametrize("ends", ["exact", "half_step"])
def test_the_ends_of_a_range_are_no_ties(ends: str) -> None:
    """A scale that is off by its last bit, as in a program that is compiled otherwise, gives the same codes."""
    x = jnp.asarray([-1.0, 0.3, 1.0, -1.0])
    largest = {"int8": 127, "int4": 7, "int2": 1}
    for name, most in largest.items():
        for factor in (1 - 2e-7, 1, 1 + 2e-7):
            span = Range(None, jnp.full(1, factor, jnp.float32))
            found = quantize_array(x, ArraySpec(type=name, range_ends=ends), range=span).codes.astype(jnp.int8)
            assert (found[0], found[2], found[3]) == (-most, most, -most)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"range_ends": "halfstep"}, UnknownName, "Did you mean 'half_step'"),
        ({"range_ends": "exact", "type": "nf4"}, ArgumentError, "is for integers, .* given nf4"),
    ],
)
def test_range_ends_that_cannot_act_are_refused(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ArraySpec(**settings)


@pytest.mark.parametrize(
    "spec", [tiled("int4"), tiled("int3"), tiled("nvfp4"), ArraySpec(), ArraySpec(calibration="rms,3")]
)
def test_blocks_give_the_same(spec: ArraySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn((256, 64))
    whole = quantize_array(x, spec)
    monkeypatch.setattr(blocks_module, "_FEWEST_ENTRIES", 2**10)
    assert blocks_module.blocks(spec.tiling(x.shape), (0, 1)).count > 1
    for one, other in zip(jax.tree.leaves(quantize_array(x, spec)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(one).astype(float), np.asarray(other).astype(float), rtol=1e-6)
    repeating = jnp.tile(x[:128], (2, 1))
    halves = np.asarray(quantize_array(repeating, spec, key=jax.random.key(0)).codes).astype(float)
    assert not np.array_equal(halves[:128], halves[128:])


LARGE = (
    ArraySpec(channel_axes=(1,)),
    tiled("int4"),
    ArraySpec(),
    tiled("int7"),
    tiled("nf4", calibration="mse"),
    tiled("fp8_e4m3"),
)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, id=f"{spec.type}-{len(spec.channel_axes)}-{dtype}", marks=marks)
        for place, spec in enumerate(LARGE)
        for dtype, marks in (("float32", () if place in (1, 4) else SLOW), ("bfloat16", SLOW if place else ()))
    ],
)
def test_a_large_parameter_costs_at_most_1_3_of_its_size(
    spec: ArraySpec, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled steps of 1 GB, none of which is run."""
    compiled = blocks_module._add_block
    steps = {}

    def record(step: Any, cut: Any, combine: Any, array: Any, others: Any, index: Any, total: Any) -> Any:
        if (step, cut) not in steps:
            usage = compiled.lower(step, cut, combine, array, others, index, total).compile().memory_analysis()
            steps[step, cut] = usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes
        return total

    monkeypatch.setattr(blocks_module, "_add_block", record)
    x = jax.ShapeDtypeStruct((2**14, 2**30 // 2**14 // jnp.dtype(dtype).itemsize), dtype)
    result = jax.eval_shape(lambda x: in_blocks(x, spec), x)
    bytes_of_codes = 0 if result.planes[0].dtype == jnp.int8 else x.size  # which become the result where they can
    assert steps and max(steps.values()) + result.nbytes + bytes_of_codes <= 1.3 * 2**30


def in_blocks(x: jax.Array, spec: ArraySpec) -> Any:
    from stack_quant.conversion import _quantized

    return _quantized(x, None, None, spec=spec, cut=blocks_module.blocks(spec.tiling(x.shape), (0, 1)))[0]


def test_fake_quantization_is_straight_through_within_the_range() -> None:
    x = jnp.asarray([[-3.0, -0.4, 0.2, 1.0, 2.5]])
    spec = ArraySpec(calibration="fixed,1")
    np.testing.assert_array_equal(fake_quantize(x, spec), dequantize(quantize_array(x, spec)))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(3 * fake_quantize(x, spec)))(x), [[0, 3, 3, 3, 0]])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(fake_quantize(x, ArraySpec())))(x), np.ones((1, 5)))
    _, tangent = jax.jvp(lambda x: fake_quantize(x, spec), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(tangent, [[0, 1, 1, 1, 0]])


def test_under_jit_vmap_and_shapes_alone() -> None:
    x, spec = drawn((3, 128, 8)), ArraySpec(type="int4", channel_axes=(1,), tiles={0: 32})
    found = jax.jit(jax.vmap(lambda x: quantize_array(x, spec)))(x)
    expected = quantize_array(x, ArraySpec(type="int4", channel_axes=(0, 2), tiles={1: 32}))
    np.testing.assert_array_equal(found.codes.astype(jnp.int8), expected.codes.astype(jnp.int8))
    abstract = jax.eval_shape(lambda x: quantize_array(x, spec), x[0])
    assert (abstract.shape, abstract.scale.shape, abstract.dtype) == ((128, 8), (4, 8), "float32")


@pytest.mark.parametrize("cases", [(), pytest.param(("all",), marks=SLOW)], ids=["few", "all"])
def test_on_eight_devices(cases: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("conversion_on_eight_devices.py")
    done = subprocess.run(
        [sys.executable, str(script), *cases], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
