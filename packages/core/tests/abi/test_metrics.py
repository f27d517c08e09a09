"""Metrics combine as they say, traced or on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.metrics import Metric, combine, combine_all

BATCHES = [
    {"loss": Metric.mean(jnp.float32(value), jnp.float32(weight)), "rows": Metric.sum(jnp.float32(weight))}
    | {"largest": Metric.max(jnp.float32(value)), "smallest": Metric.min(jnp.float32(value))}
    for value, weight in ((4.0, 1.0), (1.0, 0.5), (7.0, 0.0))
]
EXPECTED = {"loss": (4.0 + 0.5) / 1.5, "rows": 1.5, "largest": 7.0, "smallest": 1.0}


def test_batches_combine_by_what_each_metric_says():
    found = combine_all(BATCHES)
    assert {name: float(metric) for name, metric in found.items()} == pytest.approx(EXPECTED)
    assert float(found["loss"].weight) == 1.5
    again = combine_all([combine_all(BATCHES[:2]), combine_all(BATCHES[2:])])
    assert {name: float(metric) for name, metric in again.items()} == pytest.approx(EXPECTED)


def test_microbatches_combine_within_a_program():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *BATCHES)
    found = jax.jit(lambda metrics: {name: combine(metric) for name, metric in metrics.items()})(stacked)
    np.testing.assert_allclose([float(found[name]) for name in EXPECTED], list(EXPECTED.values()), rtol=1e-6)


def test_nothing_is_the_mean_of_nothing():
    assert combine_all([]) == {}
    assert float(combine_all([{"loss": Metric.mean(0.0, 0.0)}])["loss"]) == 0.0
