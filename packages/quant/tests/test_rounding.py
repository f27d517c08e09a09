import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant.qtypes import QTYPES, QType
from stack_quant.rounding import as_codes, encode, snap

DRAWS = 4000


def levels(kind: QType) -> np.ndarray:
    """All finite values of a type, by way of its codes' own dtype."""
    if kind.codebook is not None:
        return np.asarray(kind.codebook, np.float32)
    if kind.is_integer:
        return np.arange(kind.smallest, kind.largest + 1, dtype=np.float32)
    codes = jnp.asarray(np.arange(2**kind.bits, dtype=np.uint8))
    codes = codes if kind.bits == 8 else codes.astype(jnp.uint4)
    values = np.asarray(jax.lax.bitcast_convert_type(codes, kind.code_dtype).astype(jnp.float32))
    return np.unique(values[np.isfinite(values)])


def codes_of(values: jax.Array, kind: QType) -> jax.Array:
    return as_codes(encode(values, kind), kind)


@pytest.mark.parametrize("name", QTYPES)
def test_each_value_goes_to_the_nearest(name: str) -> None:
    kind = QTYPES[name]
    grid = levels(kind)
    values = np.concatenate([grid, np.random.default_rng(0).uniform(1.1 * grid[0], 1.1 * grid[-1], 2000)])
    values = np.concatenate([values, np.random.default_rng(1).normal(size=2000)]).astype(np.float32)
    found = np.asarray(snap(jnp.asarray(values), kind))
    nearest = np.abs(values[:, None].astype(np.float64) - grid).min(axis=1)
    np.testing.assert_allclose(np.abs(found.astype(np.float64) - values), nearest, atol=2e-7 * kind.largest)
    codes = codes_of(jnp.asarray(values), kind)
    assert codes.dtype == kind.code_dtype
    decoded = grid[np.asarray(codes.astype(jnp.int32))] if kind.codebook else np.asarray(codes.astype(jnp.float32))
    np.testing.assert_allclose(decoded, found, atol=2e-7)


@pytest.mark.parametrize("name", [name for name, kind in QTYPES.items() if name.startswith(("fp", "mx"))])
def test_codes_of_floats_are_those_of_a_conversion(name: str) -> None:
    """Ties, subnormals, signs of zero and what is out of range, next to every float32 of 16 bits."""
    kind, words = QTYPES[name], np.arange(2**16, dtype=np.uint32) << 16
    values = jnp.asarray(np.concatenate([words | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(np.float32))
    values = values[~jnp.isnan(values)]
    expected = np.asarray(jnp.clip(values, kind.smallest, kind.largest)).astype(kind.code_dtype)
    found = jax.jit(codes_of, static_argnums=1)(values, kind)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), expected.view(np.uint8))
    if kind.bits == 8:
        assert np.all(np.isnan(np.asarray(codes_of(jnp.asarray([jnp.nan, -jnp.nan]), kind).astype(jnp.float32))))


@pytest.mark.parametrize("name", QTYPES)
def test_nothing_is_rounded_by_a_conversion(name: str) -> None:
    """XLA leaves out conversions of floats to fewer bits and back, and fake quantization with them."""
    jaxpr = jax.make_jaxpr(lambda values: codes_of(values, QTYPES[name]))(jnp.ones(3))
    converted = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    assert not [eqn for eqn in converted if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)]


def test_ties_go_to_even() -> None:
    halves = jnp.asarray([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    np.testing.assert_array_equal(snap(halves, QTYPES["int8"]), [-2, -2, 0, 0, 2, 2])
    np.testing.assert_array_equal(snap(jnp.asarray([2.5, 3.5, 5.0]), QTYPES["fp4"]), [2, 4, 4])


@pytest.mark.parametrize("name", QTYPES)
def test_stochastic_rounding_keeps_the_mean(name: str) -> None:
    kind = QTYPES[name]
    grid = levels(kind)
    values = np.random.default_rng(0).uniform(0.9 * grid[0], 0.9 * grid[-1], 40).astype(np.float32)
    values = np.concatenate([values, np.linspace(-0.9, 0.9, 11, dtype=np.float32)])
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: snap(jnp.asarray(values), kind, key=key)))(keys), np.float64)
    above = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    gap = grid[above] - grid[above - 1]
    assert np.all(np.abs(drawn - values) <= gap * (1 + 1e-6))
    # The mean's standard deviation is at most gap / 2 / sqrt(draws); a bias of 4% of a step is found.
    np.testing.assert_array_less(np.abs(drawn.mean(axis=0) - values), 4.5 * gap / 2 / np.sqrt(DRAWS) + 1e-6)
    assert np.all(drawn.std(axis=0)[np.abs(values - snap(jnp.asarray(values), kind)) > 0.2 * gap] > 0)
