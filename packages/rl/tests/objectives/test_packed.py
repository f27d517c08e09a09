"""Episodes in shared rows: the same gradient and metrics as with one row each."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core import ops
from stack_core.abi.errors import ConfigError
from stack_rl import rollouts
from stack_rl.environments.cell import CellConfig
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.objectives.settings import Correction
from stack_rl.packing import PackedRows, row_counts
from stack_rl.rollouts import RolloutData

from . import test_algorithms
from .test_algorithms import ALGORITHMS, SEQ

OF_SEQUENCES = GRPOConfig(epochs=2, correction=Correction(level="sequence_product"), entropy=0.1, clip_low=0.1)


def plan(segment_ids: np.ndarray, counts=(1, 2, 3, 4, 5, 6, 7)) -> PackedRows:
    return PackedRows.plan(np.asarray(segment_ids), counts)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS.values(), OF_SEQUENCES], ids=[*ALGORITHMS, "of_sequences"])
def test_packed_rows_have_the_gradient_and_the_metrics_of_padded_ones(algorithm, monkeypatch):
    gradient, metrics = test_algorithms.step(algorithm)
    padded = test_algorithms.batch

    def packed(algorithm):
        found = {name: np.asarray(each) for name, each in padded(algorithm).items()}
        found = plan(found["segment_ids"]).pack(found)
        assert found["tokens"].shape == (4, SEQ) and found["segment_ids"].max() > 1
        return {name: jnp.asarray(each) for name, each in found.items()}

    monkeypatch.setattr(test_algorithms, "batch", packed)
    of_packed, metrics_of_packed = test_algorithms.step(algorithm)
    assert np.abs(gradient).max() > 1e-4
    np.testing.assert_allclose(of_packed, gradient, rtol=1e-6, atol=1e-9)
    assert metrics.pop("padding") == pytest.approx(1 - 44 / 96)
    assert metrics_of_packed.pop("padding") == pytest.approx(1 - 44 / 48)
    assert metrics_of_packed == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 3))
def test_what_is_packed_can_be_unpacked(lengths, dropped):
    rows, seq = len(lengths), 6
    segment_ids = (np.arange(seq) < np.asarray(lengths)[:, None]).astype(np.int32)
    there = segment_ids > 0
    values = np.where(there, 1 + np.arange(rows * seq).reshape(rows, seq), 0)
    batch = {
        "segment_ids": segment_ids,
        "positions": there * np.arange(seq, dtype=np.int32),
        "targets": np.where(there, values, -100),
        "candidates": np.where(there[..., None], values[..., None], -1),
        "real": there.any(axis=1).astype(np.float32),
        "reward": np.arange(rows, dtype=np.float32),
        "dropped": (np.arange(rows) < dropped).astype(np.float32),
        "share": np.full(rows, 1 / rows, np.float32),
    }
    placed = plan(segment_ids, row_counts(rows, 1))
    found = placed.pack(batch)
    assert {len(each) for each in found.values()} <= {*row_counts(rows, 1), rows}
    np.testing.assert_array_equal(placed.unpack(found["positions"]), batch["positions"])
    np.testing.assert_array_equal(placed.unpack(found["targets"])[there], batch["targets"][there])
    filled = found["segment_ids"] > 0
    assert sorted(found["targets"][filled]) == sorted(values[there])
    assert (found["targets"][~filled] == -100).all() and (found["candidates"][~filled] == -1).all()
    for row, segments in enumerate(found["segment_ids"]):
        assert found["real"][row] == len(set(segments[segments > 0]))
    assert found["reward"] @ found["real"] == pytest.approx(batch["reward"] @ batch["real"], rel=1e-5)
    assert found["dropped"].sum() == batch["dropped"].sum() and found["share"].sum() == pytest.approx(1)


def test_scalings_that_depend_on_the_longest_sequence_of_a_row_are_refused(monkeypatch):
    monkeypatch.setattr(rollouts, "registries", SimpleNamespace(engines={"static": None}))
    data = RolloutData(environment=CellConfig(), seq_tokens=12, packed=True).for_objective(GRPOConfig())
    scaling = ops.DynamicScaling(factor=2.0, max_position_embeddings=8)
    model = SimpleNamespace(max_positions=16, vocab_size=16, rope_scaling=scaling)
    with pytest.raises(ConfigError, match=r"rope_scaling is 'dynamic'.*data\.seq_tokens is 12.*at most 8"):
        data.check(model)
    model.rope_scaling = dataclasses.replace(scaling, max_position_embeddings=12)
    data.check(model)


def test_numbers_of_rows_are_multiples_of_the_parts_and_few():
    assert row_counts(256, 1)[-5:] == (48, 64, 96, 128, 192) and row_counts(256, 64) == (64, 128, 192)
    assert row_counts(24, 8) == (8, 16) and row_counts(16, 16) == () and row_counts(1, 1) == ()
    ids = np.repeat([[1, 1, 0, 0]], 8, axis=0)
    assert [plan(ids, counts).shape[0] for counts in [(2, 4), (2, 6), (2,)]] == [4, 6, 8]
