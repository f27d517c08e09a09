import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from stack_quant.tiling import Tiling

SHAPE = (4, 6, 3)
COUNTS = list(itertools.product((1, 2, 4), (1, 3, 6), (1, 3)))


@pytest.mark.parametrize("scale_shape", COUNTS, ids=str)
def test_reductions_within_tiles(scale_shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    tiles = Tiling(SHAPE, scale_shape)
    split = tiles.split(jnp.asarray(x))
    np.testing.assert_array_equal(tiles.join(split), x)
    found = np.asarray(tiles.join(jnp.max(split, axis=tiles.within, keepdims=True)))
    assert found.shape == scale_shape
    sizes = [size // count for size, count in zip(SHAPE, scale_shape, strict=True)]
    for index in np.ndindex(scale_shape):
        tile = tuple(slice(place * size, (place + 1) * size) for place, size in zip(index, sizes, strict=True))
        assert found[index] == x[tile].max()
    # One entry for each tile reaches all entries of its own.
    spread = jnp.broadcast_to(tiles.split(jnp.asarray(found)), split.shape)
    np.testing.assert_array_equal(tiles.join(spread), np.kron(found, np.ones(sizes)))


@pytest.mark.parametrize("scale_shape", COUNTS, ids=str)
def test_only_what_is_cut_becomes_two_axes(scale_shape: tuple[int, ...]) -> None:
    """An axis of size 1 beside a cut one costs a copy of the array on CPUs."""
    tiles = Tiling(SHAPE, scale_shape)
    assert 1 not in tiles.split(jnp.zeros(SHAPE)).shape
