import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_quant import ArraySpec, dequantize, quantize_array
from stack_quant.streams import empty_statistics, observe, observed_range

BATCHES = [
    jnp.asarray(np.random.default_rng(seed).normal(size=(2 + seed, 8, 6)) * (1 + seed), jnp.float32)
    for seed in range(3)
]


def range_over(spec: ArraySpec):
    statistics = empty_statistics(spec, BATCHES[0].shape)
    for batch in BATCHES:
        statistics = jax.jit(observe, static_argnums=2)(statistics, batch, spec)
    return observed_range(statistics)


def test_extremes_and_mean_squares_are_those_of_the_whole_stream() -> None:
    rows = np.concatenate([np.asarray(batch).reshape(-1, 6) for batch in BATCHES])
    np.testing.assert_array_equal(range_over(ArraySpec(channel_axes=(-1,))).high[0, 0], np.abs(rows).max(axis=0))
    spread = range_over(ArraySpec(calibration="minmax"))
    assert (float(spread.low[0, 0, 0]), float(spread.high[0, 0, 0])) == (rows.min(), rows.max())
    rms = range_over(ArraySpec(channel_axes=(-1,), calibration="rms,2")).high[0, 0]
    np.testing.assert_allclose(rms, 2 * np.sqrt(np.square(rows).mean(axis=0)), rtol=1e-5)


def test_averages_over_batches() -> None:
    of_each = [np.sort(np.abs(np.asarray(batch)).ravel())[int(np.ceil(0.9 * batch.size)) - 1] for batch in BATCHES]
    percentile = range_over(ArraySpec(calibration="percentile,90")).high
    np.testing.assert_allclose(percentile, np.mean(of_each).reshape(1, 1, 1), rtol=1e-6)
    most = [float(jnp.max(jnp.abs(batch))) for batch in BATCHES]
    moving = range_over(ArraySpec(calibration="moving,0.5")).high
    np.testing.assert_allclose(moving, np.average(most, weights=[0.25, 0.5, 1]).reshape(1, 1, 1), rtol=1e-6)


def test_a_range_serves_other_batch_and_sequence_sizes() -> None:
    spec = ArraySpec(channel_axes=(-1,))
    x = BATCHES[0][:1, :3] / 4
    found = dequantize(quantize_array(x, spec, range=range_over(spec)))
    assert found.shape == (1, 3, 6) and float(jnp.abs(found - x).max()) < 0.1
    np.testing.assert_array_equal(dequantize(quantize_array(x[:, :1], spec, range=range_over(spec))), found[:, :1])


def test_no_batch_is_no_range_and_nan_is_not_forgotten() -> None:
    spec = ArraySpec()
    statistics = empty_statistics(spec, (2, 3))
    with pytest.raises(ArgumentError, match=r"mlp/x: the range .* Observe at least one batch"):
        quantize_array(jnp.ones((2, 3)), spec, range=observed_range(statistics), name="mlp/x")
    for batch in (jnp.full((2, 3), jnp.nan), jnp.ones((2, 3))):
        statistics = observe(statistics, batch, spec)
    assert jnp.isnan(observed_range(statistics).high).all()


def test_ranges_along_axes_that_vary_are_refused() -> None:
    spec = ArraySpec(channel_axes=(0,))
    statistics = observe(empty_statistics(spec, (2, 8, 6)), BATCHES[0], spec)
    with pytest.raises(ShapeError, match="along axes of fixed size only"):
        observe(statistics, BATCHES[1], spec)
