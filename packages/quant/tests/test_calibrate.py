from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant import ArraySpec, dequantize, quantize_array
from stack_quant.blocks import Blocks
from stack_quant.calibrate import calibrate

NAMES = ("absmax", "absmax,0.5", "minmax", "rms,3", "percentile,90", "mse", "fixed,-1,2", "moving,0.9")


def drawn(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(0.3, 1, size=shape), dtype)


def spec_of(calibration: str, **settings: Any) -> ArraySpec:
    return ArraySpec(channel_axes=(1,), tiles={0: 16}, calibration=calibration, **settings)


def test_ranges_are_what_their_names_say() -> None:
    x = drawn((32, 4))
    tiles = np.asarray(x).reshape(2, 16, 4)
    found = {name: calibrate(x, spec_of(name)) for name in NAMES}
    most = np.abs(tiles).max(axis=1)
    np.testing.assert_array_equal(found["absmax"].high, most)
    np.testing.assert_array_equal(found["absmax,0.5"].high, most / 2)
    np.testing.assert_array_equal(found["minmax"].low, np.minimum(tiles.min(axis=1), 0))
    np.testing.assert_array_equal(found["minmax"].high, np.maximum(tiles.max(axis=1), 0))
    np.testing.assert_allclose(found["rms,3"].high, 3 * np.sqrt(np.square(tiles).mean(axis=1)), rtol=1e-6)
    np.testing.assert_array_equal(found["percentile,90"].high, np.sort(np.abs(tiles), axis=1)[:, 14])
    np.testing.assert_array_equal(found["fixed,-1,2"].low, np.full((2, 4), -1))
    np.testing.assert_array_equal(found["moving,0.9"].high, most)
    assert all((span.low is None) == spec_of(name).symmetric for name, span in found.items())


@pytest.mark.parametrize(
    ("percent", "dtype"),
    [*((percent, "float32") for percent in (0.1, 50, 99.9, 100)), (99.9, "float16"), (50, "bfloat16")],
)
def test_percentiles_are_entries_of_the_tile(percent: float, dtype: str) -> None:
    x = drawn((32, 4), dtype)
    span = calibrate(x, spec_of(f"percentile,{percent}", symmetric=False))
    ranked = np.sort(np.maximum(np.asarray(x, np.float32).reshape(2, 16, 4), 0), axis=1)
    np.testing.assert_array_equal(span.high, ranked[:, max(int(np.ceil(0.16 * percent)), 1) - 1])


@pytest.mark.parametrize("kind", ["int2", "int4", "fp4", "nf4"])
def test_mse_is_never_worse_than_absmax(kind: str) -> None:
    x = drawn((64, 8))

    def error(calibration: str) -> float:
        spec = ArraySpec(type=kind, channel_axes=(1,), calibration=calibration)
        return float(jnp.linalg.norm(dequantize(quantize_array(x, spec)) - x))

    assert error("mse") < 0.97 * error("absmax")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("symmetric", "cut"),
    [(True, Blocks(0, 2, whole_tiles=True)), (False, Blocks(1, 4, whole_tiles=True))],
)
def test_blocks_change_nothing(cut: Blocks, symmetric: bool, name: str) -> None:
    x, spec = drawn((32, 4)), spec_of(name, symmetric=symmetric)
    for found, expected in zip(calibrate(x, spec, cut=cut), calibrate(x, spec), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_one_tile_change_nothing(name: str) -> None:
    x, spec = drawn((32, 4)), ArraySpec(calibration=name)
    cut = Blocks(0, 8, whole_tiles=False)
    leaves = (jax.tree.leaves(calibrate(x, spec, cut=cut)), jax.tree.leaves(calibrate(x, spec)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *leaves)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_mean_squares_neither_vanish_nor_overflow(scale: float) -> None:
    x = drawn((32, 4)) * np.float32(scale)
    expected = 3 * scale * np.sqrt(np.square(np.asarray(drawn((32, 4)), np.float64).reshape(2, 16, 4)).mean(axis=1))
    np.testing.assert_allclose(calibrate(x, spec_of("rms,3")).high, expected, rtol=1e-5)
