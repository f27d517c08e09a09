"""Golden frequencies: ROPE_INIT_FUNCTIONS of transformers 5, head_dim 16, theta 10000."""

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops

LONGROPE = ops.LongRopeScaling(
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=tuple(1.0 + 0.1 * index for index in range(8)),
    long_factor=tuple(2.0 + index for index in range(8)),
)
YARN_OF_DEEPSEEK = ops.YarnScaling(
    factor=40.0,
    original_max_position_embeddings=4096,
    mscale=0.707,
    mscale_all_dim=1.0,
    beta_fast=16.0,
    beta_slow=2.0,
    truncate=False,
)
LLAMA3 = ops.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
DYNAMIC = ops.DynamicScaling(factor=2.0, max_position_embeddings=64)

GOLDEN = {
    "linear": (
        ops.LinearScaling(factor=4.0), 16,
        [0.25, 0.079056941, 0.025, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05], 1.0,
    ),
    "dynamic_within": (
        DYNAMIC, 16,
        [1.0, 0.316227764, 0.1, 0.0316227786, 0.01, 0.00316227786, 0.001, 0.000316227786], 1.0,
    ),
    "dynamic_beyond": (
        DYNAMIC, 100,
        [1.0, 0.283945143, 0.0806248412, 0.0228930302, 0.00650036521, 0.001845747, 0.000524090894, 0.000148813066], 1.0,
    ),
    "llama3": (
        LLAMA3, 16,
        [1.0, 0.244384587, 0.0130422562, 0.00395284733, 0.00125, 0.000395284733, 0.000125, 3.95284733e-05], 1.0,
    ),
    "proportional": (
        ops.ProportionalScaling(partial_rotary_factor=0.45, factor=2.0), 16,
        [0.5, 0.158113882, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0,
    ),
    "yarn": (
        ops.YarnScaling(factor=4.0, original_max_position_embeddings=64), 16,
        [1.0, 0.237170815, 0.05, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05], 1.138629436111989,
    ),
    "yarn_of_deepseek": (
        YARN_OF_DEEPSEEK, 16,
        [1.0, 0.316227764, 0.1, 0.0316227786, 0.00579010462, 0.000123952457, 2.5e-05, 7.90569447e-06],
        0.9210423553163399,
    ),
    "longrope_short": (
        LONGROPE, 64,
        [1.0, 0.287479758, 0.0833333358, 0.0243252143, 0.00714285718, 0.00210818532, 0.000625, 0.000186016332],
        1.1547005383792517,
    ),
    "longrope_long": (
        LONGROPE, 65,
        [0.5, 0.10540925, 0.025, 0.00632455572, 0.00166666671, 0.000451753964, 0.000125, 3.51364179e-05],
        1.1547005383792517,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    scaling, seq, expected, expected_factor = GOLDEN[name]
    frequencies, factor = scaling.frequencies(10_000.0, 16, jnp.arange(seq))
    np.testing.assert_allclose(np.ravel(frequencies), expected, rtol=1e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_rope_applies_frequencies_and_factor(name: str) -> None:
    scaling, seq, frequencies, factor = GOLDEN[name]
    x = jnp.concatenate([jnp.ones((1, seq, 1, 8)), jnp.zeros((1, seq, 1, 8))], axis=-1)
    turned = ops.rope(x, jnp.arange(seq)[None], scaling=scaling)
    angles = np.arange(seq)[:, None] * np.array(frequencies)
    expected = factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    np.testing.assert_allclose(turned[0, :, 0], expected, atol=2e-5)


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_long_row_does_not_change_a_short_one(scaling: ops.RopeScaling) -> None:
    x = jnp.ones((2, 4, 1, 16))
    positions = jnp.array([[0, 1, 2, 3], [97, 98, 99, 100]])
    together = ops.rope(x, positions, scaling=scaling)
    for row in range(2):
        alone = ops.rope(x[row : row + 1], positions[row : row + 1], scaling=scaling)
        np.testing.assert_array_equal(together[row : row + 1], alone)
